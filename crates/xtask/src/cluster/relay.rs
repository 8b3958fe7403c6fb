//! TCP relay in front of etcd, which can stop passing on anything: a gateway that is cut off from the store.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{sleep, spawn};
use std::time::Duration;

/// A relay. Its threads end with the process.
pub(super) struct Relay {
    address: SocketAddr,
    is_cut: Arc<AtomicBool>,
}

/// Interval at which a cut relay checks whether it passes on again.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

impl Relay {
    /// A relay to an address.
    pub(super) fn start(to: SocketAddr) -> Result<Self, String> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|why| format!("relay: {why}"))?;
        let address = listener.local_addr().map_err(|why| format!("relay: {why}"))?;
        let is_cut = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&is_cut);
        spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(to) else { continue };
                let (Ok(client_too), Ok(server_too)) = (client.try_clone(), server.try_clone())
                else {
                    continue;
                };
                let (up, down) = (Arc::clone(&of_thread), Arc::clone(&of_thread));
                spawn(move || pass_on(client, server, &up));
                spawn(move || pass_on(server_too, client_too, &down));
            }
        });
        Ok(Self { address, is_cut })
    }

    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Passes on nothing from now on, or everything again.
    pub(super) fn set_cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::Release);
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut bytes = [0; 16 << 10];
    while let Ok(count) = from.read(&mut bytes) {
        while is_cut.load(Ordering::Acquire) {
            sleep(CHECK_INTERVAL);
        }
        if count == 0 || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}
