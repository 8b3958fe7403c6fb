//! vfio-user endpoint as a poller on a reactor.

use std::io;
use std::os::fd::AsFd;

use tenmil_base::{Instant, Span};
use tenmil_linux::local_socket::LocalConnection;
use tenmil_linux::poll_set::{Interest, PollSet, ReadyDescriptor};
use tenmil_linux::socket_stream::StreamListener;
use tenmil_nvme_controller::transport::NextPoll;
use tenmil_reactor::{Context, DetachReason, MeanLatency, PollResult, Poller, PollerWake};

use super::endpoint::{Endpoint, TIME_LIMIT};
use super::rejected_clients::RejectedClients;

/// Listener and the endpoint behind it.
pub(super) struct EndpointPoller {
    listen_socket: StreamListener,
    endpoint: Endpoint,
    rejected_clients: RejectedClients,
    watch: PollSet,
    /// Events of the last wait.
    ready: Vec<ReadyDescriptor>,
    /// Readiness that is registered for the client's socket, if any.
    watched: Option<Interest>,
    /// Sources that could not be registered: while there is any, the reactor must not sleep.
    ready_flags: ReadySockets,
    /// When accepting is retried after it failed for lack of file descriptors.
    listen_at: Option<Instant>,
    now: Instant,
    /// Next poll of the sockets.
    next_due: Instant,
    iterations: u32,
    /// Time until which the controller has no work of its own.
    until: Instant,
    /// Outstanding I/O commands as of the last iteration that did work, and their latency.
    outstanding: usize,
    latency: MeanLatency,
}

#[derive(Default)]
struct ReadySockets {
    listen_socket: bool,
    client: bool,
    media: bool,
    rejected_clients: bool,
}

const LISTENER: u64 = 0;
const CLIENT: u64 = 1;
const MEDIUM: u64 = 2;
const VISITOR: u64 = 3;
const READABLE: Interest = Interest { readable: true, writable: false };
const NOTHING: Interest = Interest { readable: false, writable: false };

/// Interval between polls of the sockets while there is other work: a poll is a system call.
const POLL_INTERVAL: Span = Span::from_us(50);
/// Number of iterations between checks for truncated memory; a power of two.
const MEMORY_CHECK_INTERVAL: u32 = 256;

impl ReadySockets {
    fn any_ready(&self) -> bool {
        self.listen_socket || self.client || self.media || self.rejected_clients
    }
}

impl EndpointPoller {
    pub(super) fn new(listen_socket: StreamListener, endpoint: Endpoint) -> io::Result<Self> {
        let watch = PollSet::new()?;
        watch.add(&listen_socket, LISTENER, READABLE)?;
        let (rejected_clients, ready, now) =
            (RejectedClients::default(), Vec::new(), Instant::default());
        Ok(Self {
            listen_socket,
            endpoint,
            rejected_clients,
            watch,
            ready,
            watched: None,
            ready_flags: ReadySockets::default(),
            listen_at: None,
            now,
            next_due: now,
            iterations: 0,
            until: now,
            outstanding: 0,
            latency: MeanLatency::default(),
        })
    }

    pub(super) fn poller_wake(&self) -> io::Result<PollerWake> {
        Ok(PollerWake::Descriptor(self.watch.as_fd().try_clone_to_owned()?))
    }

    /// Polls the listener and the sockets. One epoll call finds out which are ready, since a
    /// useless accept is expensive: it allocates a socket first.
    fn poll_sockets(&mut self, now: Instant) -> usize {
        self.update_session_interest();
        let mut ready = std::mem::take(&mut self.ready);
        // Sources without registration are always tried.
        let is_blind = self.watch.wait(Some(Span::default()), &mut ready).is_err();
        let has = |token, is_unheard| {
            is_blind || is_unheard || ready.iter().any(|found| found.token == token)
        };
        let (client, listen_socket) =
            (has(CLIENT, self.ready_flags.client), has(LISTENER, self.ready_flags.listen_socket));
        self.ready = ready;
        let mut count = if client { self.endpoint.process_messages(now) } else { 0 };
        count += self.endpoint.disconnect_if_timed_out(now);
        if !self.rejected_clients.is_empty() {
            self.rejected_clients.poll(now);
            self.ready_flags.rejected_clients &= !self.rejected_clients.is_empty();
        }
        if self.endpoint.is_detaching() {
            return count;
        }
        if self.listen_at.is_some_and(|at| at <= now) {
            self.listen_at = None;
            let opened = self.watch.modify(&self.listen_socket, LISTENER, READABLE);
            self.ready_flags.listen_socket = opened.is_err();
        }
        while listen_socket && self.listen_at.is_none() {
            match self.listen_socket.accept() {
                Ok(None) => break,
                Ok(Some(socket)) => {
                    count += 1;
                    self.attach_or_reject_client(now, LocalConnection::from(socket));
                }
                // The pending connection keeps the listener readable, which would keep the reactor
                // awake.
                Err(_) => {
                    self.listen_at = Some(now.after(TIME_LIMIT));
                    let _ = self.watch.modify(&self.listen_socket, LISTENER, NOTHING);
                }
            }
        }
        count
    }

    fn attach_or_reject_client(&mut self, now: Instant, connection: LocalConnection) {
        if self.endpoint.is_free() {
            self.endpoint.attach_client(now, connection);
            self.watched = None;
        } else if let Some(socket) = self.rejected_clients.add_client(now, connection) {
            let added = self.watch.add(socket, VISITOR, READABLE);
            self.ready_flags.rejected_clients |= added.is_err();
        }
    }

    /// Registers the current socket with the current interest.
    fn update_session_interest(&mut self) {
        if let Some(socket) = self.endpoint.socket_of_disconnecting_client() {
            // A closed peer keeps the socket ready forever. Removing an unregistered socket fails
            // harmlessly.
            let _ = self.watch.remove(socket);
        }
        let Some((socket, interest)) = self.endpoint.socket_interest() else {
            (self.watched, self.ready_flags.client) = (None, false);
            return;
        };
        let result = match self.watched {
            None => self.watch.add(socket, CLIENT, interest),
            Some(watched) if watched == interest => return,
            Some(_) => self.watch.modify(socket, CLIENT, interest),
        };
        (self.watched, self.ready_flags.client) = (Some(interest), result.is_err());
    }

    /// Counts commands that started and completed in iterations of the controller.
    fn count_commands(&mut self) {
        let front = &mut self.endpoint.device.front;
        let ended = usize::try_from(front.take_completed_count()).unwrap_or(usize::MAX);
        self.latency.record_completions(ended);
        self.outstanding = front.executing_count();
    }

    /// Does a bounded amount of work; returns the amount done.
    pub(super) fn poll_once(&mut self, now: Instant) -> usize {
        self.latency.account_in_flight(now, self.outstanding);
        self.now = now;
        self.iterations = self.iterations.wrapping_add(1);
        let wait = self.endpoint.device.poll_controller(now);
        let mut count = usize::from(wait == NextPoll::Busy);
        if count > 0 {
            self.count_commands();
        }
        self.until = match wait {
            NextPoll::Busy => now,
            NextPoll::Pending(until) | NextPoll::Idle(until) => until,
        };
        let may_be_late = count > 0 || self.endpoint.device.has_mapped_doorbells();
        if !may_be_late || now >= self.next_due {
            self.next_due = now.after(POLL_INTERVAL);
            count += self.poll_sockets(now);
        }
        count += self.endpoint.continue_pending(now);
        if self.iterations & (MEMORY_CHECK_INTERVAL - 1) == 0 {
            self.endpoint.disconnect_if_memory_truncated(now);
        }
        count
    }
}

impl Poller for EndpointPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        PollResult::from_count(self.poll_once(context.now()))
    }

    fn arm(&mut self) -> PollResult {
        let now = self.now;
        self.update_session_interest();
        self.endpoint.disconnect_if_memory_truncated(now);
        let Self { endpoint, watch, ready_flags, .. } = self;
        let until = endpoint.device.front.arm_wakeup(now);
        endpoint.device.front.for_each_new_wake_fd(|descriptor| {
            ready_flags.media |= watch.add(descriptor, MEDIUM, READABLE).is_err();
        });
        self.until = until.unwrap_or(now);
        self.count_commands();
        let mut has_new_events = until.is_none() || self.ready_flags.any_ready();
        has_new_events |= self.endpoint.is_waiting_for_controller();
        has_new_events |= self.poll_sockets(now) > 0 || self.endpoint.continue_pending(now) > 0;
        self.update_session_interest();
        PollResult::from_count(usize::from(has_new_events))
    }

    fn disarm(&mut self) {
        self.endpoint.device.front.disarm_wakeup();
        self.ready.clear();
        self.next_due = Instant::default();
    }

    fn wake_at(&self) -> Instant {
        let listen_at = self.listen_at.unwrap_or(Instant::NEVER);
        self.until.min(self.rejected_clients.wake_at()).min(listen_at).min(self.endpoint.wake_at())
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean_latency().filter(|_| self.outstanding > 0)
    }

    fn try_detach(&mut self, parting: DetachReason) -> bool {
        match parting {
            DetachReason::Migrating => true,
            DetachReason::Exiting => {
                self.endpoint.disconnect_client(self.now);
                !self.endpoint.is_detaching()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;

    use tenmil_base::{BlockDevice, Instant, Span};
    use tenmil_dma::RegionTable;
    use tenmil_drivers::RamDevice;
    use tenmil_linux::local_socket::LocalConnection;
    use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
    use tenmil_reactor::{PollResult, Poller};

    use super::{Endpoint, EndpointPoller};
    use crate::vfio_user::ControllerOptions;
    use crate::vfio_user::client_memory::DmaMappings;
    use crate::vfio_user::irq_eventfds::IrqEventFds;
    use crate::vfio_user::nvme_pci_function::NvmePciFunction;

    const TIME_LIMIT: Span = Span::from_secs(20);

    /// Endpoint that only the test runs, and the directory of its socket.
    fn start_endpoint() -> (EndpointPoller, tempfile::TempDir) {
        let (regions, now) = (RegionTable::new(16), Instant::default());
        let directory = tempfile::tempdir().unwrap();
        let listen_socket =
            StreamListener::open(&ListenAddress::Path(directory.path().join("socket"))).unwrap();
        let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, 512, 8).unwrap());
        let (mappings, irqs, options) =
            (DmaMappings::new(regions.clone()), IrqEventFds::new(3), ControllerOptions::default());
        let options = ControllerOptions { queues: 2, ..options };
        let device =
            NvmePciFunction::new(vec![ram], &options, &mappings, irqs.clone(), &regions, now)
                .unwrap();
        let endpoint = Endpoint::new(device, mappings, irqs, regions, sync_channel(4).0);
        (EndpointPoller::new(listen_socket, endpoint).unwrap(), directory)
    }

    fn connect_client(directory: &tempfile::TempDir) -> LocalConnection {
        LocalConnection::connect(&directory.path().join("socket"), TIME_LIMIT).unwrap()
    }

    /// Arms until nothing is left to do; false if that never happens.
    fn run_until_armed(host: &mut EndpointPoller) -> bool {
        for _ in 0..100 {
            let found = host.arm();
            let mut ready = Vec::new();
            host.watch.wait(Some(Span::default()), &mut ready).unwrap();
            if found == PollResult::Idle && ready.is_empty() {
                return true;
            }
            host.disarm();
        }
        false
    }

    #[test]
    fn silent_connections_do_not_keep_the_reactor_awake() {
        let (mut host, directory) = start_endpoint();
        assert!(run_until_armed(&mut host), "no client is connected");
        let clients: Vec<LocalConnection> = (0..12).map(|_| connect_client(&directory)).collect();
        assert!(run_until_armed(&mut host), "one has it, and others wait");
        drop(clients);
    }

    #[test]
    fn silent_client_does_not_block_others() {
        let (mut host, directory) = start_endpoint();
        let silent = connect_client(&directory);
        host.poll_once(Instant::default());
        assert!(!host.endpoint.is_free());
        let by = Instant::default().after(Span::from_secs(5));
        assert_eq!(host.wake_at(), by);
        host.poll_once(Instant { ns: by.ns - 1 });
        assert!(!host.endpoint.is_free());
        (0..4).for_each(|_| {
            host.poll_once(by);
        });
        assert!(host.endpoint.is_free());
        let client = connect_client(&directory);
        let request = tenmil_vfio_user::Client::<()>::new();
        client.send(request.next_outgoing().unwrap().bytes).unwrap();
        (1..5).for_each(|secs| {
            host.poll_once(by.after(Span::from_secs(60 * secs)));
        });
        assert!(!host.endpoint.is_free(), "who has begun stays");
        drop(silent);
    }

    #[test]
    fn partial_message_does_not_block_other_clients() {
        for revocation in [1, 15, 16, 20] {
            let (mut host, directory) = start_endpoint();
            let client = connect_client(&directory);
            let mut request = tenmil_vfio_user::Client::<()>::new();
            let accesses = Instant::default();
            client.send(request.next_outgoing().unwrap().bytes).unwrap();
            (0..4).for_each(|_| {
                host.poll_once(accesses);
            });
            request.record_sent(request.next_outgoing().unwrap().bytes.len());
            // A whole message, and a part of another.
            request.request_region_read(tenmil_vfio_user::region_index::CONFIGURATION, 0, 4);
            let message = request.next_outgoing().unwrap().bytes.to_vec();
            let at = accesses.after(Span::from_secs(60));
            client.send(&message).unwrap();
            client.send(&message[..revocation]).unwrap();
            host.poll_once(at);
            let by = at.after(Span::from_secs(5));
            assert_eq!(host.wake_at(), by, "cut at {revocation}");
            // More of it earns no more time.
            client.send(&message[revocation..revocation + 1]).unwrap();
            host.poll_once(Instant { ns: by.ns - 1 });
            assert!(!host.endpoint.is_free(), "cut at {revocation}");
            (0..4).for_each(|_| {
                host.poll_once(by);
            });
            assert!(host.endpoint.is_free(), "cut at {revocation}");
        }
    }

    #[test]
    fn fragmented_message_is_answered_and_its_client_stays_connected() {
        let (mut host, directory) = start_endpoint();
        let client = connect_client(&directory);
        let mut request = tenmil_vfio_user::Client::<()>::new();
        let message = request.next_outgoing().unwrap().bytes.to_vec();
        let mut now = Instant::default();
        for round in 0..3 {
            let (first, rest) = message.split_at(20);
            client.send(first).unwrap();
            host.poll_once(now);
            now = now.after(Span::from_secs(4));
            client.send(rest).unwrap();
            host.poll_once(now);
            if round > 0 {
                break;
            }
            request.record_sent(message.len());
            now = now.after(Span::from_secs(60));
            host.poll_once(now);
            assert!(!host.endpoint.is_free(), "who is between messages stays");
        }
    }

    #[test]
    fn client_that_does_not_receive_does_not_keep_the_reactor_awake() {
        let (mut host, directory) = start_endpoint();
        let client = connect_client(&directory);
        assert!(run_until_armed(&mut host));
        let mut request = tenmil_vfio_user::Client::<()>::new();
        client.send(request.next_outgoing().unwrap().bytes).unwrap();
        assert!(run_until_armed(&mut host));
        // The replies exceed the buffers of the socket and of the server.
        request.record_sent(request.next_outgoing().unwrap().bytes.len());
        request.request_region_read(tenmil_vfio_user::region_index::CONFIGURATION, 0, 256);
        let message = request.next_outgoing().unwrap().bytes;
        let mut in_vain = 0;
        while in_vain < 3 {
            if client.send(message).unwrap() > 0 {
                in_vain = 0;
            } else {
                host.arm();
                host.disarm();
                in_vain += 1;
            }
        }
        assert!(run_until_armed(&mut host), "its socket says that there is more to read");
    }
}
