"""Where a pod departs from the Pod Security Standard "restricted", by the standard's own table
(https://kubernetes.io/docs/concepts/security/pod-security-standards), and from two rules of ours:
no container may write to its image, and no pod has a token for the API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
SELINUX = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
HANDLERS = ("livenessProbe", "readinessProbe", "startupProbe")
Spec = dict[str, Any]


def departures(spec: Spec) -> set[str]:
    """What of a pod's ``spec`` is not restricted: ``pod: …`` or the name of a container."""
    found = {f"pod: {what}" for what in _of_the_pod(spec)}
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            found |= {f"{container['name']}: {what}" for what in _of(container, spec)}
    return found


def _of_the_pod(spec: Spec) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    context = spec.get("securityContext", {})
    yield from _of_both(context)
    for sysctl in context.get("sysctls", []):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    for volume in spec.get("volumes", []):
        for kind in sorted(volume.keys() - {"name"} - VOLUMES):
            yield f"volume {volume['name']} is a {kind}"
    if spec.get("automountServiceAccountToken") is not False:
        yield "has a token"


def _of_both(context: Spec) -> Iterator[str]:
    """What must not be set in the context of a pod, nor in that of a container."""
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield "appArmorProfile Unconfined"
    options = context.get("seLinuxOptions", {})
    if options.get("type") not in SELINUX or options.get("user") or options.get("role"):
        yield "seLinuxOptions"
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"


def _of(container: Spec, spec: Spec) -> Iterator[str]:
    own = container.get("securityContext", {})
    effective = {**spec.get("securityContext", {}), **own}
    yield from _of_both(own)
    if own.get("privileged"):
        yield "privileged"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if effective.get("runAsNonRoot") is not True:
        yield "may run as root"
    if effective.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
        yield "no seccompProfile"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "may write to its image"
    yield from _capabilities(own.get("capabilities", {}))
    yield from _of_the_host(container)


def _capabilities(given: Spec) -> Iterator[str]:
    if "ALL" not in given.get("drop", []):
        yield "keeps capabilities"
    for name in given.get("add", []):
        if name != "NET_BIND_SERVICE":
            yield f"adds {name}"


def _of_the_host(container: Spec) -> Iterator[str]:
    for port in container.get("ports", []):
        if port.get("hostPort"):
            yield "hostPort"
    handlers = [container.get(name, {}) for name in HANDLERS]
    handlers += container.get("lifecycle", {}).values()
    for handler in handlers:
        for action in ("httpGet", "tcpSocket"):
            if handler.get(action, {}).get("host"):
                yield f"{action} of a host"
