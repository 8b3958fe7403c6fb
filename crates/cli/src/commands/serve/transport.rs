//! Transports of `serve` and the options valid for each.

use super::{ServeArguments, TlsArgument};
use tenmil_base::Error;

/// Transport of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServeTransport {
    Nbd,
    NvmeTcp,
    VfioUser,
    VhostUser,
    Ublk,
}

impl ServeTransport {
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

/// Rejects options that have no effect for these transports.
pub(super) fn check_transport_options(
    arguments: &ServeArguments,
    over: &[ServeTransport],
) -> Result<(), Error> {
    use ServeTransport::{Nbd, NvmeTcp, VfioUser, VhostUser};
    let ServeArguments {
        nqn, allowed_host, allow_any_host, buffer_memory, state_dir, socket, ..
    } = arguments;
    let ServeArguments { export_name, max_connections, .. } = arguments;
    let (per_address, per_host) =
        (arguments.connections_per_address, arguments.connections_per_host);
    let switches: [(&str, bool, &[ServeTransport]); 20] = [
        ("--nqn", nqn.is_some(), &[NvmeTcp]),
        ("--allowed-host", !allowed_host.is_empty(), &[NvmeTcp]),
        ("--allow-any-host", *allow_any_host, &[NvmeTcp]),
        ("--buffer-memory", buffer_memory.is_some(), &[NvmeTcp]),
        ("--state-dir", state_dir.is_some(), &[NvmeTcp]),
        ("--tls", arguments.tls != TlsArgument::Off, &[NvmeTcp]),
        ("--psk", !arguments.psk.is_empty(), &[NvmeTcp]),
        ("--dhchap", !arguments.dhchap.is_empty(), &[NvmeTcp]),
        ("--dhchap-controller", arguments.dhchap_controller.is_some(), &[NvmeTcp]),
        ("--keyring", arguments.keyring.is_some(), &[NvmeTcp]),
        ("--socket", !socket.is_empty(), &[NvmeTcp]),
        ("--export-name", export_name.is_some(), &[Nbd]),
        ("--allow-resize", arguments.allow_resize, &[Nbd]),
        ("--allow-remote-write", arguments.allow_remote_write, &[Nbd]),
        ("--max-connections", max_connections.is_some(), &[Nbd, NvmeTcp]),
        ("--connections-per-address", per_address.is_some(), &[Nbd, NvmeTcp]),
        ("--nbd-idle-timeout", arguments.nbd_idle_timeout.is_some(), &[Nbd]),
        ("--nbd-tls-certificate or --nbd-tls-psk", arguments.nbd_tls.is_given(), &[Nbd]),
        ("--connections-per-host", per_host.is_some(), &[NvmeTcp]),
        // Only root may open the control file of ublk, also at the end.
        ("--user", arguments.user.is_some(), &[Nbd, NvmeTcp, VfioUser, VhostUser]),
    ];
    let is_used = |has_use: &[ServeTransport]| over.iter().any(|one| has_use.contains(one));
    let idle = switches.iter().find(|(_, is_given, has_use)| *is_given && !is_used(has_use));
    let Some((switch, _, has_use)) = idle else { return Ok(()) };
    let expected: Vec<&str> = has_use.iter().map(|over| over.name()).collect();
    Err(Error::usage(format!(
        "serve over {}: {switch} is given, expected only with a listener for {}",
        over.iter().map(|one| one.name()).collect::<Vec<_>>().join(" and "),
        expected.join(" or ")
    )))
}
