//! Over what something is served, and which switches mean something there.

use super::ServeArguments;
use crate::Refused;

/// How clients reach what is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    Nbd,
    NvmeTcp,
    VfioUser,
    VhostUser,
    Ublk,
}

impl Over {
    fn name(self) -> &'static str {
        match self {
            Self::Nbd => "NBD",
            Self::NvmeTcp => "NVMe/TCP",
            Self::VfioUser => "vfio-user",
            Self::VhostUser => "vhost-user",
            Self::Ublk => "ublk",
        }
    }
}

/// Refuses switches that would change nothing for those who are served.
pub(super) fn check_switches(arguments: &ServeArguments, over: Over) -> Result<(), Refused> {
    use Over::{Nbd, NvmeTcp, Ublk, VfioUser, VhostUser};
    let ServeArguments { nqn, host, allow_any_host, memory, state, socket, .. } = arguments;
    let ServeArguments { name, limit_iops, limit_bytes, connections, .. } = arguments;
    let (per_address, per_host) =
        (arguments.connections_per_address, arguments.connections_per_host);
    let switches: [(&str, bool, &[Over]); 15] = [
        ("--nqn", nqn.is_some(), &[NvmeTcp]),
        ("--host", !host.is_empty(), &[NvmeTcp]),
        ("--allow-any-host", *allow_any_host, &[NvmeTcp]),
        ("--memory", memory.is_some(), &[NvmeTcp]),
        ("--state", state.is_some(), &[NvmeTcp]),
        ("--socket", !socket.is_empty(), &[NvmeTcp]),
        ("--name", name.is_some(), &[Nbd]),
        ("--allow-resize", arguments.allow_resize, &[Nbd]),
        ("--allow-remote-write", arguments.allow_remote_write, &[Nbd]),
        ("--limit-iops", limit_iops.is_some(), &[Nbd, VfioUser, VhostUser, Ublk]),
        ("--limit-bytes", limit_bytes.is_some(), &[Nbd, VfioUser, VhostUser, Ublk]),
        ("--connections", connections.is_some(), &[Nbd, NvmeTcp]),
        ("--connections-per-address", per_address.is_some(), &[Nbd, NvmeTcp]),
        ("--nbd-idle-timeout", arguments.nbd_idle_timeout.is_some(), &[Nbd]),
        ("--connections-per-host", per_host.is_some(), &[NvmeTcp]),
    ];
    let idle = switches.iter().find(|(_, is_given, has_use)| *is_given && !has_use.contains(&over));
    let Some((switch, _, has_use)) = idle else { return Ok(()) };
    let expected: Vec<&str> = has_use.iter().map(|over| over.name()).collect();
    Err(Refused::caller(format!(
        "serve over {}: {switch} is given, expected only with a listener for {}",
        over.name(),
        expected.join(" or ")
    )))
}
