"""All checks of ``kvshm doctor``, in the order in which they are printed."""

from __future__ import annotations

from . import devices, engines, machine, place, settings
from .checks import Check

CHECKS = (
    Check(
        "shared memory",
        "size and kind of /dev/shm, which vLLM needs; kvshm has no files there",
        "make it larger: docker run --shm-size=1g, or in Kubernetes an emptyDir of medium Memory",
        machine.shm,
    ),
    Check(
        "memory",
        "what the machine and this container's memory limit leave",
        "raise the memory limit, or give engines a smaller KV cache on CPUs",
        machine.memory,
    ),
    Check(
        "memory files",
        "whether memfd_create and seals work",
        "permit memfd_create and fcntl in the container's seccomp profile",
        machine.sealed_memory,
    ),
    Check(
        "file descriptors",
        "how many a process may open, of this shell",
        "raise it: ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit",
        machine.descriptors,
    ),
    Check(
        "run directory",
        "owner, mode and length of its path",
        "do what the line says; all engines of a node and their coordinator need the same one",
        place.run_directory,
    ),
    Check(
        "file system",
        "on which kind of file system the run directory lies",
        "set KVSHM_RUN_DIR to a directory of this machine, for example below /run",
        place.run_file_system,
    ),
    Check(
        "engines elsewhere",
        "processes in which kvshm is enabled that use another run directory or namespace",
        "give all engines that are to share the same KVSHM_RUN_DIR and KVSHM_NAMESPACE",
        place.elsewhere,
    ),
    Check(
        "user",
        "of which user engines are seen",
        "run all engines, the coordinator and this command as one user",
        place.users,
    ),
    Check(
        "leftovers",
        "files of dead processes in the run directory",
        "start the coordinator, which clears up, or run kvshm clean in that namespace",
        place.leftovers,
    ),
    Check(
        "RemoveIPC",
        "whether logind removes vLLM's files in /dev/shm at the end of a login session",
        "set RemoveIPC=no in /etc/systemd/logind.conf, run engines as a system user, or enable "
        "lingering (loginctl enable-linger)",
        machine.remove_ipc,
    ),
    Check(
        "coordinator",
        "whether the coordinator of each namespace answers and goes round",
        "start kvshm-coordinator, or restart it; engines join it by themselves",
        engines.coordinator,
    ),
    Check(
        "engines",
        "whether each lives, is ready and goes round, as kvshm status says",
        "see kvshm status and the engine's log; restart an engine whose process has ended or hangs",
        engines.health,
    ),
    Check(
        "hook errors",
        "errors in kvshm's hooks: after one an engine shares nothing until it is restarted",
        "restart the engine; report the error of its log with the file of --bundle",
        engines.hook_errors,
    ),
    Check(
        "engines that decline",
        "engines that share nothing, and why",
        "change what the reason names and restart the engine, or leave it unshared",
        engines.declined,
    ),
    Check(
        "versions",
        "segments and coordinators of another version of kvshm, and segments that make no sense",
        "install the same version of kvshm for all engines and the coordinator; restart them",
        engines.versions,
    ),
    Check(
        "fingerprints",
        "engines that have met another one that they cannot share with, and the differing field",
        "make the named field equal, or separate the engines by KVSHM_NAMESPACE "
        "(docs/fingerprint.md)",
        engines.fingerprints,
    ),
    Check(
        "replicas",
        "how late engines learn of each other's blocks",
        "see whether the coordinator and the engines' client threads go round: kvshm status",
        engines.replica_lag,
    ),
    Check(
        "clocks",
        "engines and coordinators whose CLOCK_MONOTONIC has an offset that kvshm cannot find out",
        "mount /proc where they and this command run: status, top and metrics cannot tell whether "
        "they are stalled",
        engines.clocks,
    ),
    Check(
        "pid namespaces",
        "engines of other containers, and engines of equal pid, between which CUDA opens no memory",
        "with GPUs let containers share a pid namespace (hostPID or shareProcessNamespace), so "
        "that no two engines have the same pid",
        engines.pid_namespaces,
    ),
    Check(
        "copy paths",
        "which engine copies from which, by which path, how fast",
        "see peer access in nvidia-smi topo -m; place engines that share behind one NVLink or "
        "PCIe switch",
        engines.copy_paths,
    ),
    Check(
        "settings",
        "whether the settings of running engines can be used",
        "correct what the line names and restart the engine",
        settings.own_settings,
    ),
    Check(
        "likely mistakes",
        "KVSHM_ names that are no settings, VLLM_PLUGINS that leaves kvshm out, and vLLM's servers "
        "beside engines that share for which KVSHM_ENABLE says neither 1 nor 0",
        "correct the environment that the line names and restart the engine",
        settings.likely_mistakes,
    ),
    Check(
        "hash seeds",
        "PYTHONHASHSEED of engines, from which vLLM's block hashes start",
        "give all engines the same PYTHONHASHSEED, or none with vLLM's default hash",
        settings.hash_seeds,
    ),
    Check(
        "allocator",
        "allocators of torch whose memory other processes cannot open",
        "take it out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF",
        settings.allocator,
    ),
    Check(
        "front end",
        "whether a front end drops the metrics of kvshm",
        "unset VLLM_USE_RUST_FRONTEND, or scrape kvshm metrics instead",
        settings.front_end,
    ),
    Check(
        "MIG",
        "whether GPUs are divided",
        "give engines that are to share one instance, or turn MIG off",
        devices.mig,
    ),
    Check(
        "MPS",
        "whether engines use one MPS daemon, and whether a GPU admits several processes",
        "set the same CUDA_MPS_PIPE_DIRECTORY for all, and compute mode Default (nvidia-smi -c 0)",
        devices.mps,
    ),
)
