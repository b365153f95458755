"""What all folders of kvshm stand on: names, times, logs, files."""
