"""Where inference engines meet kvshm."""
