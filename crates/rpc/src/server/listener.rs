//! Listeners of the control server, and the loop that accepts connections.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tenmil_linux::local_socket::{LocalConnection, LocalListener, PeerCredentials};
use tenmil_linux::runtime_directory::{RuntimeDirectory, current_uid};
use tenmil_linux::sandbox::give_path_to_service_user;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tokio::io::Interest;

use super::admission::{Peer, TcpSecurity};
use super::connection::{reject_connection, serve_connection};
use super::control_stream::{ControlSocket, ControlStream};
use super::request_checks::ControlToken;
use super::{ServerError, ServerState, watch_descriptor};
use crate::error::{ErrorCode, RpcError};
use crate::tls::{ControlTls, TlsChannel};

/// Addresses at which a server listens, and the token of its TCP clients.
#[derive(Debug, Default)]
pub struct ControlListeners {
    listeners: Vec<ControlListener>,
    token: Option<ControlToken>,
}

/// Listening socket.
#[derive(Debug)]
pub(super) enum ControlListener {
    /// Socket of the process in a runtime directory.
    Process(LocalListener),
    /// Socket with a path of its own.
    Path {
        listener: StreamListener,
        /// Group that may connect: the mode of the socket file decides.
        group: Option<u32>,
    },
    /// TCP port of this machine.
    Tcp(StreamListener),
    /// TCP port with TLS.
    Tls { listener: StreamListener, tls: ControlTls },
}

/// Pause after a failed accept, usually caused by running out of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Number of connections accepted before other tasks run.
const ACCEPTED_MAX: usize = 16;

impl ControlListeners {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Listens as process `pid` in `directory`, with a name if one is given.
    ///
    /// # Errors
    ///
    /// If a live process of this identifier or name listens there, or the error of the system call.
    pub fn add_process_socket(
        &mut self,
        directory: &RuntimeDirectory,
        pid: u32,
        instance: Option<&str>,
    ) -> Result<(), ServerError> {
        let refused =
            |path: PathBuf| move |error| ServerError { address: path.display().to_string(), error };
        let listener = LocalListener::bind(directory, pid);
        let mut listener = listener.map_err(refused(directory.socket_of(pid)))?;
        if let Some(name) = instance {
            let named = listener.set_instance(directory, name);
            named.map_err(refused(directory.link_of(name)))?;
        }
        self.listeners.push(ControlListener::Process(listener));
        Ok(())
    }

    /// Listens at `path`. With a group, its members may connect too.
    ///
    /// # Errors
    ///
    /// If a live process listens there, if the path is another kind of file, or the error of the system
    /// call.
    pub fn add_socket(&mut self, path: &Path, group: Option<u32>) -> Result<(), ServerError> {
        let refused = |error| ServerError { address: path.display().to_string(), error };
        let address = ListenAddress::Path(path.to_owned());
        let listener = StreamListener::open(&address).map_err(refused)?;
        give_path_to_service_user(path).map_err(|errno| refused(errno.into()))?;
        if let Some(group) = group {
            listener.allow_group(group).map_err(refused)?;
        }
        self.listeners.push(ControlListener::Path { listener, group });
        Ok(())
    }

    /// Listens at a TCP address of this machine. Other machines cannot connect, because the
    /// connection is neither encrypted nor authenticated.
    ///
    /// # Errors
    ///
    /// If the address is not a loopback address, or the error of the system call.
    pub fn add_tcp(&mut self, address: SocketAddr) -> Result<(), ServerError> {
        let refused = |error| ServerError { address: address.to_string(), error };
        if !address.ip().is_loopback() {
            let text = "the address is reachable from other machines, and the API is not encrypted, \
                        expected a loopback address such as 127.0.0.1";
            return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        let listener = StreamListener::open(&ListenAddress::Tcp(address)).map_err(refused)?;
        self.listeners.push(ControlListener::Tcp(listener));
        Ok(())
    }

    /// Listens at a TCP address, for clients with TLS. The token has to be set before.
    ///
    /// # Errors
    ///
    /// If other machines reach the address and nothing authenticates their clients, or the error of the
    /// system call.
    pub fn add_tls(&mut self, address: SocketAddr, tls: &ControlTls) -> Result<(), ServerError> {
        let refused = |error| ServerError { address: format!("https://{address}"), error };
        let is_authenticated = self.token.is_some() || tls.verifies_clients();
        if !address.ip().is_loopback() && !is_authenticated {
            let text = "the address is reachable from other machines, and clients are not \
                        authenticated, expected a token or an authority of client certificates";
            return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        let listener = StreamListener::open(&ListenAddress::Tcp(address)).map_err(refused)?;
        self.listeners.push(ControlListener::Tls { listener, tls: tls.clone() });
        Ok(())
    }

    /// Token that TCP clients need.
    pub fn set_token(&mut self, token: ControlToken) {
        self.token = Some(token);
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.listeners.is_empty()
    }

    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let path = |listener: &ControlListener| match listener {
            ControlListener::Process(listener) => Some(listener.path().to_owned()),
            ControlListener::Path { listener, .. } => match listener.address() {
                ListenAddress::Path(path) => Some(path.clone()),
                ListenAddress::Tcp(_) => None,
            },
            ControlListener::Tcp(_) | ControlListener::Tls { .. } => None,
        };
        self.listeners.iter().filter_map(path).collect()
    }

    /// TCP addresses, and whether each has TLS.
    pub(super) fn addresses(&self) -> Vec<(SocketAddr, bool)> {
        let address = |listener: &ControlListener| {
            let (listener, has_tls) = match listener {
                ControlListener::Tcp(listener) => (listener, false),
                ControlListener::Tls { listener, .. } => (listener, true),
                _ => return None,
            };
            match listener.address() {
                ListenAddress::Tcp(address) => Some((*address, has_tls)),
                ListenAddress::Path(_) => None,
            }
        };
        self.listeners.iter().filter_map(address).collect()
    }

    pub(super) fn into_parts(self) -> (Vec<ControlListener>, Option<ControlToken>) {
        (self.listeners, self.token)
    }
}

impl ControlListener {
    /// Accepts the next pending connection, if any.
    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::Process(listener) => Ok(listener.accept()?.map(OwnedFd::from)),
            Self::Path { listener, .. } | Self::Tcp(listener) | Self::Tls { listener, .. } => {
                listener.accept()
            }
        }
    }

    /// Identifies the client of an accepted connection, and checks that it may connect.
    fn identify(&self, socket: OwnedFd) -> io::Result<(ControlSocket, Peer, Result<(), RpcError>)> {
        let security = match self {
            Self::Tcp(_) => Some(TcpSecurity::Plaintext),
            Self::Tls { tls, .. } if tls.verifies_clients() => Some(TcpSecurity::ClientCertificate),
            Self::Tls { .. } => Some(TcpSecurity::Tls),
            Self::Process(_) | Self::Path { .. } => None,
        };
        if let Some(security) = security {
            let stream = TcpStream::from(socket);
            // A response is one send, which must not wait for an acknowledgment.
            stream.set_nodelay(true)?;
            let peer = Peer::Tcp { address: stream.peer_addr()?, security };
            return Ok((ControlSocket::Tcp(stream), peer, Ok(())));
        }
        let connection = LocalConnection::from(socket);
        let peer = connection.peer()?;
        let allowed = match self {
            // The kernel has checked the mode of the socket file.
            Self::Path { group: Some(_), .. } => Ok(()),
            _ => check_peer_uid(peer, current_uid()),
        };
        Ok((ControlSocket::Local(connection), Peer::Process(peer), allowed))
    }

    /// Channel of an accepted connection; none without TLS.
    fn channel(&self) -> io::Result<Option<TlsChannel>> {
        match self {
            Self::Tls { tls, .. } => tls.channel().map(Some),
            _ => Ok(None),
        }
    }
}

impl AsRawFd for ControlListener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Process(listener) => listener.as_fd().as_raw_fd(),
            Self::Path { listener, .. } | Self::Tcp(listener) | Self::Tls { listener, .. } => {
                listener.as_fd().as_raw_fd()
            }
        }
    }
}

/// Accepts connections until the task is aborted.
pub(super) async fn accept_connections(state: Rc<ServerState>, listener: ControlListener) {
    let Ok(listener) = watch_descriptor(listener, Interest::READABLE) else { return };
    loop {
        let Ok(mut readable) = listener.readable().await else { return };
        for _ in 0..ACCEPTED_MAX {
            match listener.get_ref().accept() {
                Ok(Some(socket)) => admit_connection(&state, listener.get_ref(), socket),
                Ok(None) => {
                    readable.clear_ready();
                    break;
                }
                Err(_) => {
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    break;
                }
            }
        }
        // Many pending connections do not delay the accepted ones.
        tokio::task::yield_now().await;
    }
}

/// Starts a task for a connection, or sends an error.
fn admit_connection(state: &Rc<ServerState>, listener: &ControlListener, socket: OwnedFd) {
    let Ok((socket, peer, allowed)) = listener.identify(socket) else { return };
    match allowed.and_then(|()| state.connections.admit(peer)) {
        Ok(connection) => {
            let stream = listener
                .channel()
                .and_then(|tls| ControlStream::new(socket, tls, Rc::clone(&connection)));
            let Ok(stream) = stream else {
                state.connections.remove(&connection);
                return;
            };
            let mut tasks = state.tasks.borrow_mut();
            // Those that have ended.
            while tasks.try_join_next().is_some() {}
            tasks.spawn_local(serve_connection(Rc::clone(state), connection, stream));
        }
        // A client that awaits a handshake could not read it.
        Err(_) if matches!(listener, ControlListener::Tls { .. }) => {}
        Err(refusal) => reject_connection(&socket, &refusal),
    }
}

/// Whether `peer` may control a process of user `uid`.
fn check_peer_uid(peer: PeerCredentials, uid: u32) -> Result<(), RpcError> {
    if peer.uid == uid || peer.uid == 0 {
        return Ok(());
    }
    Err(RpcError::usage(
        ErrorCode::NotAllowed,
        format!("connect: user is uid {}, expected uid {uid} or 0", peer.uid),
    ))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::local_socket::PeerCredentials;

    use super::{ControlListeners, check_peer_uid};
    use crate::error::ErrorCode;

    #[test]
    fn only_the_same_user_and_root_may_connect() {
        let peer = |uid| PeerCredentials { pid: 9, uid, gid: uid };
        assert_eq!(check_peer_uid(peer(1000), 1000), Ok(()));
        assert_eq!(check_peer_uid(peer(0), 1000), Ok(()));
        let refusal = check_peer_uid(peer(1001), 1000).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::NotAllowed);
        assert_eq!(refusal.message, "connect: user is uid 1001, expected uid 1000 or 0");
        assert!(check_peer_uid(peer(1000), 0).is_err());
    }

    #[test]
    fn address_that_other_machines_reach_is_rejected() {
        let mut listeners = ControlListeners::new();
        for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
            let refused = listeners.add_tcp(address.parse().unwrap()).unwrap_err().to_string();
            assert!(refused.contains("expected a loopback address"), "{refused}");
        }
        assert!(listeners.is_empty());
    }
}
