//! NBD: options of its listeners, with or without TLS.

mod tls;

use tenmil_base::Error;
use tenmil_linux::socket_stream::ListenAddress;

pub(super) use self::tls::{NbdTlsArguments, load_tls};
use super::ServeArguments;

/// NBD clients that may be connected at once.
pub(super) const CLIENTS_MAX: u32 = 64;

/// Rejects writable exports on non-loopback addresses, unless all clients there authenticate by TLS or
/// they were explicitly allowed.
pub(super) fn check_writable_export_is_local(
    arguments: &ServeArguments,
    listen: &[(ListenAddress, bool)],
) -> Result<(), Error> {
    let authenticates = arguments.nbd_tls.authenticates_clients();
    let is_open = |(address, requires_tls): &&(ListenAddress, bool)| {
        let is_remote = matches!(address, ListenAddress::Tcp(at) if !at.ip().is_loopback());
        is_remote && !(*requires_tls && authenticates)
    };
    let Some((remote, requires_tls)) = listen.iter().find(is_open) else { return Ok(()) };
    if arguments.read_only || arguments.allow_remote_write {
        return Ok(());
    }
    let text = format!(
        "listen at {}: other machines could write there without authentication, expected an address of \
         loopback, --read-only or --allow-remote-write",
        listen_text(remote, *requires_tls)
    );
    let hint =
        "Add --read-only, or --allow-remote-write if every client that can connect may write.";
    Err(Error::usage(text).with_hint(hint))
}

/// An address in the syntax of `--listen`.
fn listen_text(address: &ListenAddress, requires_tls: bool) -> String {
    let scheme = if requires_tls { "nbds" } else { "nbd" };
    match address {
        ListenAddress::Path(path) => format!("{scheme}:{}", path.display()),
        ListenAddress::Tcp(port) => format!("{scheme}://{port}"),
    }
}
