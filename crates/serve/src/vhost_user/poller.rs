//! vhost-user endpoint as a poller on a reactor.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use tenmil_base::{Instant, Span};
use tenmil_linux::local_socket::LocalConnection;
use tenmil_linux::poll_set::{Interest, PollSet, ReadyDescriptor};
use tenmil_linux::socket_stream::StreamListener;
use tenmil_reactor::{Context, DetachReason, PollResult, Poller, PollerWake};

use super::endpoint::{Endpoint, TIME_LIMIT};
use super::queue_mailbox::EndpointEvents;

/// Listener and the endpoint behind it.
pub(super) struct EndpointPoller {
    listen_socket: StreamListener,
    endpoint: Endpoint,
    events: Arc<EndpointEvents>,
    watch: PollSet,
    /// Events of the last wait.
    ready: Vec<ReadyDescriptor>,
    /// Readiness that is registered for the front end's socket, if any.
    watched: Option<Interest>,
    /// Whether the listener is registered.
    is_listener_watched: bool,
    /// Whether a source could not be registered: then the reactor must not sleep.
    is_deaf: bool,
    /// When accepting is retried after it failed for lack of file descriptors.
    listen_at: Option<Instant>,
    now: Instant,
    /// Next poll of the sockets.
    next_due: Instant,
}

const LISTENER: u64 = 0;
const FRONT: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

/// Interval between polls of the sockets while the reactor is awake: a poll is a system call.
const POLL_INTERVAL: Span = Span::from_us(200);

impl EndpointPoller {
    pub(super) fn new(listen_socket: StreamListener, endpoint: Endpoint) -> io::Result<Self> {
        let watch = PollSet::new()?;
        watch.add(&listen_socket, LISTENER, READABLE)?;
        let events = Arc::clone(&endpoint.device.events);
        let (ready, now) = (Vec::new(), Instant::default());
        Ok(Self {
            listen_socket,
            endpoint,
            events,
            watch,
            ready,
            watched: None,
            is_listener_watched: true,
            is_deaf: false,
            listen_at: None,
            now,
            next_due: now,
        })
    }

    pub(super) fn poller_wake(&self) -> io::Result<PollerWake> {
        Ok(PollerWake::Descriptor(self.watch.as_fd().try_clone_to_owned()?))
    }

    /// Polls the listener and the socket. Returns the amount of work.
    fn poll_sockets(&mut self, now: Instant) -> usize {
        self.update_interests(now);
        let mut ready = std::mem::take(&mut self.ready);
        // Without epoll both are tried on every poll, and the reactor does not sleep.
        self.is_deaf |= self.watch.wait(Some(Span { ns: 0 }), &mut ready).is_err();
        let is_ready = |token: u64| ready.iter().any(|found| found.token == token);
        let (has_front, has_listener) = (is_ready(FRONT), is_ready(LISTENER));
        self.ready = ready;
        let mut count = 0;
        if has_front || self.is_deaf {
            count += self.endpoint.poll_messages(now);
        }
        if has_listener || self.is_deaf {
            count += self.accept_front_ends(now);
        }
        count
    }

    fn accept_front_ends(&mut self, now: Instant) -> usize {
        let mut count = 0;
        while !self.endpoint.is_detaching() && self.listen_at.is_none() {
            match self.listen_socket.accept() {
                Ok(None) => break,
                Ok(Some(socket)) => {
                    count += 1;
                    let connection = LocalConnection::from(socket);
                    if self.endpoint.is_free() {
                        self.endpoint.attach_client(now, connection);
                        self.watched = None;
                    } else {
                        self.endpoint.report_rejected_front_end(&connection);
                    }
                }
                // The pending connection keeps the listener readable, which would keep the reactor
                // awake.
                Err(_) => self.listen_at = Some(now.after(TIME_LIMIT)),
            }
        }
        count
    }

    /// Registers the sources to wait for in the current state.
    fn update_interests(&mut self, now: Instant) {
        self.listen_at = self.listen_at.filter(|at| *at > now);
        let wants_listener = self.listen_at.is_none() && !self.endpoint.is_detaching();
        if wants_listener != self.is_listener_watched {
            let changed = match wants_listener {
                true => self.watch.add(&self.listen_socket, LISTENER, READABLE),
                false => self.watch.remove(&self.listen_socket),
            };
            self.is_deaf |= changed.is_err();
            self.is_listener_watched = wants_listener;
        }
        let awaited = self.endpoint.socket_interest().map(|(_, interest)| interest);
        if awaited == self.watched {
            return;
        }
        let Some(socket) = self.endpoint.client_socket() else {
            // Closing the socket has removed it from the epoll set.
            self.watched = None;
            return;
        };
        let changed = match (self.watched, awaited) {
            (None, Some(interest)) => self.watch.add(socket, FRONT, interest),
            (Some(_), Some(interest)) => self.watch.modify(socket, FRONT, interest),
            // A closed peer would keep the socket ready forever.
            (_, None) => self.watch.remove(socket),
        };
        self.is_deaf |= changed.is_err();
        self.watched = awaited;
    }

    /// Does a bounded amount of work; returns the amount done.
    pub(super) fn poll_once(&mut self, now: Instant) -> usize {
        self.now = now;
        let is_resized = self.events.take();
        let has_event = is_resized.is_some();
        let mut count = usize::from(has_event);
        if is_resized == Some(true) {
            self.endpoint.forward_resize();
        }
        let is_due = now >= self.next_due;
        if is_due {
            count += self.poll_sockets(now);
        }
        if is_due || has_event {
            count += self.endpoint.continue_pending(now);
        }
        if is_due || count > 0 {
            // The peer may react at once, so poll again.
            self.next_due = if count > 0 { now } else { now.after(POLL_INTERVAL) };
        }
        count
    }
}

impl Poller for EndpointPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        PollResult::from_count(self.poll_once(context.now()))
    }

    fn arm(&mut self) -> PollResult {
        self.next_due = Instant::default();
        let count = self.poll_once(self.now);
        self.update_interests(self.now);
        PollResult::from_count(count + usize::from(self.is_deaf))
    }

    fn disarm(&mut self) {
        self.next_due = Instant::default();
    }

    /// The light thread may be parked while virtqueues are busy on the same reactor.
    fn may_park(&self) -> bool {
        !self.is_deaf
    }

    fn wake_at(&self) -> Instant {
        self.endpoint.wake_at().min(self.listen_at.unwrap_or(Instant::NEVER))
    }

    fn try_detach(&mut self, parting: DetachReason) -> bool {
        match parting {
            DetachReason::Migrating => true,
            DetachReason::Exiting => {
                self.endpoint.disconnect_client(self.now);
                self.endpoint.continue_pending(self.now);
                self.endpoint.is_free()
            }
        }
    }
}
