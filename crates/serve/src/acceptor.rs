//! Accept loop shared by the socket servers: listeners and the thread that waits on them.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use tenmil_base::{Error, Interrupts, Span};
use tenmil_linux::poll_set::{Interest, PollSet, ReadyDescriptor};
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{EventFdVectors, NamedThread, StopFlag};

/// Receiver of the sockets that an [`Acceptor`] accepts.
pub(crate) trait AcceptHandler: Send + 'static {
    /// Takes over a socket accepted on the listener with index `listen_socket`.
    fn handle_accepted_socket(
        &mut self,
        socket: OwnedFd,
        listen_socket: usize,
    ) -> Result<(), Error>;

    /// Handles pending events of the exported device; called when its event source is readable.
    fn handle_device_event(&mut self) {}

    /// Reports an error that no request can carry. The report is dropped if the receiver is gone.
    fn report_error(&self, text: String);
}

/// Thread that accepts connections. Dropping it stops accepting and joins the thread.
#[derive(Debug)]
pub(crate) struct Acceptor {
    addresses: Vec<ListenAddress>,
    wake: EventFdVectors,
    thread: Option<NamedThread<()>>,
}

/// Pause after a failed accept, usually caused by running out of file descriptors.
const ACCEPT_RETRY: Span = Span::from_ms(100);
const WAKE: u64 = 0;
const SERVED: u64 = 1;
const FIRST_LISTENER: u64 = 2;
const READABLE: Interest = Interest { readable: true, writable: false };

impl Acceptor {
    /// Starts a thread that accepts on `listen_sockets` and reports device events when `served` is readable.
    pub(crate) fn start(
        name: &str,
        listen_sockets: Vec<StreamListener>,
        served: Option<BorrowedFd<'_>>,
        keeper: impl AcceptHandler,
    ) -> io::Result<Self> {
        let addresses =
            listen_sockets.iter().map(|listen_socket| listen_socket.address().clone()).collect();
        let wake = EventFdVectors::new(1)?;
        let watch = PollSet::new()?;
        watch.add(wake.descriptor(0).ok_or(io::ErrorKind::InvalidInput)?, WAKE, READABLE)?;
        if let Some(served) = served {
            watch.add(served, SERVED, READABLE)?;
        }
        for (token, listen_socket) in (FIRST_LISTENER..).zip(&listen_sockets) {
            watch.add(listen_socket, token, READABLE)?;
        }
        let thread = NamedThread::spawn(name, None, move |stop| {
            run_accept_loop(&listen_sockets, &watch, keeper, stop)
        })?;
        Ok(Self { addresses, wake, thread: Some(thread) })
    }

    /// Listen addresses, with ports chosen by the kernel filled in.
    pub(crate) fn addresses(&self) -> &[ListenAddress] {
        &self.addresses
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        thread.stop_flag().set();
        self.wake.raise(0);
        // Dropping the thread joins it.
        drop(thread);
    }
}

fn run_accept_loop(
    listen_sockets: &[StreamListener],
    watch: &PollSet,
    mut keeper: impl AcceptHandler,
    stop: &StopFlag,
) {
    let mut ready: Vec<ReadyDescriptor> = Vec::new();
    while !stop.is_stopped() {
        if let Err(error) = watch.wait(None, &mut ready) {
            // Without epoll the loop would only spin.
            keeper.report_error(format!("wait for connections: {error}"));
            return;
        }
        for found in &ready {
            match found.token {
                WAKE => {}
                SERVED => keeper.handle_device_event(),
                listen_socket => accept_pending(
                    listen_sockets,
                    usize::try_from(listen_socket - FIRST_LISTENER).unwrap_or(0),
                    &mut keeper,
                ),
            }
        }
    }
}

/// Accepts one pending connection of a listener. The poll set is level-triggered, so further
/// connections are reported by the next wait.
fn accept_pending(
    listen_sockets: &[StreamListener],
    listen_socket: usize,
    keeper: &mut impl AcceptHandler,
) {
    match listen_sockets[listen_socket].accept() {
        Ok(None) => {}
        Ok(Some(socket)) => {
            if let Err(text) = keeper.handle_accepted_socket(socket, listen_socket) {
                keeper.report_error(format!("connect: {text}"));
            }
        }
        Err(error) => {
            keeper.report_error(format!("accept: {error}"));
            tenmil_linux::named_thread::sleep(ACCEPT_RETRY);
        }
    }
}
