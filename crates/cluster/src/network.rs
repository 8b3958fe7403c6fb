//! The network between hosts and target processes: connections, and links that lose them.
//!
//! ```text
//!   host ── dial ──▶ link (up, silent) ──▶ port (refuses, listens, dark) ──▶ arrivals ──▶ process
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Broken, Instant, Memory, Random, Received, Segment, Span, Stream, Stretch, WakeSource};
use dma::Regions;
use remote::{Dial, Dialled};
use sim::network::{self, Direction, End, Fault, LineOptions, NetworkOptions};

use crate::history::History;
use crate::tap::{Commands, Tap};

/// The network. A handle.
#[derive(Clone)]
pub(crate) struct Network(Arc<Mutex<State>>);

/// What all connections are like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CableOptions {
    /// How long each byte takes.
    pub(crate) delay: Span,
    /// By up to so much longer some take.
    pub(crate) jitter: Span,
    /// Whether what is sent arrives in arbitrary pieces.
    pub(crate) splits: bool,
    /// How long memory is read after it was sent, at most.
    pub(crate) release: Span,
}

/// Whether a process is reached at its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    /// The machine is up and no process listens.
    Refuses,
    /// A process accepts connections.
    Listens,
    /// The machine has no power.
    Dark,
}

/// What happens to connections between a host and a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// They are reset.
    Reset,
    /// Nothing of them arrives any more, and nobody is told.
    Vanish,
    /// What is sent to the process arrives so much later, and in order.
    Delay(Direction, Span),
}

struct State {
    now: Instant,
    random: Random,
    options: CableOptions,
    cables: Vec<Cable>,
    ports: Vec<PortState>,
    /// Until when nothing passes between a host and a process.
    silent: Vec<Vec<Instant>>,
    history: Arc<Mutex<History>>,
    has_packets: bool,
    connections: u64,
}

struct PortState {
    port: Port,
    /// Where the process's end of a connection has its data.
    memory: Arc<dyn Memory>,
    arrivals: Vec<Box<dyn Stream>>,
}

/// A connection.
struct Cable {
    host: usize,
    process: usize,
    network: network::Network,
    /// The process's end, left behind by a machine that has lost its power.
    orphan: Option<End>,
    is_dark: bool,
    /// Ends that are in use.
    ends: u32,
    number: u64,
}

/// One end of a connection.
struct Plug {
    end: Option<End>,
    net: Network,
    number: u64,
    tap: Option<Tap>,
    is_host: bool,
}

struct HostDial {
    net: Network,
    host: usize,
    process: usize,
    memory: Regions,
}

struct Dialling {
    net: Network,
    host: usize,
    process: usize,
    memory: Regions,
    begun: Instant,
    until: Instant,
}

/// The time to open a connection.
const ROUND_TRIP: Span = Span::from_us(200);
const INBOX_BYTES: usize = 16 << 10;

impl Network {
    /// A network of so many hosts and processes, without a connection.
    pub(crate) fn new(
        options: CableOptions,
        (hosts, processes): (usize, usize),
        random: Random,
        history: Arc<Mutex<History>>,
    ) -> Self {
        let nothing: Arc<dyn Memory> = Arc::new(Regions::new(1));
        let port = || {
            let memory = Arc::clone(&nothing);
            PortState { port: Port::Refuses, memory, arrivals: Vec::new() }
        };
        let has_packets = history.lock().is_ok_and(|history| history.has_packets());
        Self(Arc::new(Mutex::new(State {
            has_packets,
            now: Instant::default(),
            random,
            options,
            cables: Vec::new(),
            ports: (0..processes).map(|_| port()).collect(),
            silent: vec![vec![Instant::default(); processes]; hosts],
            history,
            connections: 0,
        })))
    }

    /// What a host calls a process with. Its data lie in `memory`.
    pub(crate) fn dial(&self, host: usize, process: usize, memory: &Regions) -> Box<dyn Dial> {
        let (net, memory) = (self.clone(), memory.clone());
        Box::new(HostDial { net, host, process, memory })
    }

    /// Moves time on.
    pub(crate) fn advance(&self, now: Instant) {
        let mut state = self.lock();
        state.now = now;
        for cable in &mut state.cables {
            cable.network.advance(now);
            // What comes to a machine without power is lost.
            if let Some(end) = &mut cable.orphan
                && matches!(end.receive(), Received::Bytes(_))
            {
                let count = end.bytes().len();
                end.consume(count);
            }
        }
        state.cables.retain(|cable| cable.ends > 0);
    }

    /// When something arrives.
    pub(crate) fn wake_at(&self) -> Instant {
        let state = self.lock();
        let live = state.cables.iter().filter(|cable| !cable.is_dark);
        live.map(|cable| cable.network.wake_at()).min().unwrap_or(Instant::NEVER)
    }

    /// What a process has not accepted yet.
    pub(crate) fn arrivals(&self, process: usize) -> Vec<Box<dyn Stream>> {
        std::mem::take(&mut self.lock().ports[process].arrivals)
    }

    /// A process whose data lie in `memory` accepts connections from now on.
    pub(crate) fn listen(&self, process: usize, memory: &Regions) {
        self.lock().ports[process].memory = Arc::new(memory.clone());
        self.set_port(process, Port::Listens);
    }

    /// Opens or closes a port. A port that is dark leaves hosts without an answer; one that is not any
    /// more resets what was connected before.
    pub(crate) fn set_port(&self, process: usize, port: Port) {
        let mut state = self.lock();
        let was = std::mem::replace(&mut state.ports[process].port, port);
        let arrivals = match port {
            Port::Listens => Vec::new(),
            _ => std::mem::take(&mut state.ports[process].arrivals),
        };
        let mut orphans = Vec::new();
        for cable in state.cables.iter_mut().filter(|cable| cable.process == process) {
            if port == Port::Dark {
                cable.is_dark = true;
                cable.network.harm(Direction::Back, Fault::BlackHole);
            } else if was == Port::Dark {
                cable.network.cut();
                orphans.extend(cable.orphan.take());
                cable.is_dark = false;
            }
        }
        drop(state);
        // Dropping an end takes the lock.
        drop(arrivals);
        drop(orphans);
    }

    /// Nothing passes between a host and a process until then; what is sent meanwhile arrives after.
    pub(crate) fn partition(&self, host: usize, process: usize, span: Span) {
        let mut state = self.lock();
        let until = state.now.after(span);
        let silent = &mut state.silent[host][process];
        *silent = until.max(*silent);
        for cable in state.between(host, process) {
            for direction in [Direction::There, Direction::Back] {
                cable.network.harm(direction, Fault::Freeze(span));
            }
        }
    }

    /// Harms the connections there are.
    pub(crate) fn harm(&self, host: usize, process: usize, harm: Harm) {
        let mut state = self.lock();
        for cable in state.between(host, process) {
            match harm {
                Harm::Reset => cable.network.cut(),
                Harm::Vanish => {
                    for direction in [Direction::There, Direction::Back] {
                        cable.network.harm(direction, Fault::BlackHole);
                    }
                }
                Harm::Delay(direction, span) => {
                    cable.network.harm(direction, Fault::Freeze(span));
                }
            }
        }
    }

    /// Ends all partitions.
    pub(crate) fn heal(&self) {
        let mut state = self.lock();
        let now = state.now;
        for silent in state.silent.iter_mut().flatten() {
            *silent = now;
        }
    }

    /// Memory that has left a host once more with other bytes than were sent.
    pub(crate) fn strays(&self) -> Vec<String> {
        self.lock().cables.iter().flat_map(|cable| cable.network.strays()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn between(&mut self, host: usize, process: usize) -> impl Iterator<Item = &mut Cable> {
        let is_it = move |cable: &&mut Cable| cable.host == host && cable.process == process;
        self.cables.iter_mut().filter(is_it)
    }

    fn cable(&mut self, number: u64) -> Option<&mut Cable> {
        self.cables.iter_mut().find(|cable| cable.number == number)
    }
}

impl Dial for HostDial {
    fn dial(&mut self, now: Instant, until: Instant) -> Box<dyn Dialled> {
        let Self { net, host, process, memory } = self;
        let (net, memory) = (net.clone(), memory.clone());
        Box::new(Dialling { net, host: *host, process: *process, memory, begun: now, until })
    }

    fn peer(&self) -> String {
        format!("target {}", self.process)
    }
}

impl Dialled for Dialling {
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, Broken>> {
        let mut state = self.net.lock();
        let port = state.ports[self.process].port;
        if port == Port::Dark || state.silent[self.host][self.process] > now {
            let why = || Broken("no answer in time".to_owned());
            return (now >= self.until).then(|| Err(why()));
        }
        if now < self.begun.after(ROUND_TRIP) {
            return None;
        }
        if port == Port::Refuses {
            return Some(Err(Broken("connection refused".to_owned())));
        }
        let CableOptions { delay, jitter, splits, release } = state.options;
        let line = LineOptions { splits, delay, jitter, ..LineOptions::default() };
        let options = NetworkOptions {
            seed: state.random.draw(),
            there: line.clone(),
            back: line,
            inbox_bytes: INBOX_BYTES,
            release_jitter: release,
            ..NetworkOptions::default()
        };
        let here: Arc<dyn Memory> = Arc::new(self.memory.clone());
        // The process's end sends and receives what lies in memory of its own.
        let there: Arc<dyn Memory> = Arc::clone(&state.ports[self.process].memory);
        let (near, far, network) = network::pair(options, here, there);
        network.advance(now);
        state.connections += 1;
        let number = state.connections;
        let (host, process) = (self.host, self.process);
        let names = (format!("host {host}"), format!("target {process} ({number})"));
        let commands = Commands::default();
        let tap = |names: (String, String)| {
            let shared = (host, Arc::clone(&commands));
            let history = Arc::clone(&state.history);
            state.has_packets.then(|| Tap::new(history, shared, names))
        };
        let sent = tap(names.clone());
        let answered = tap((names.1, names.0));
        let cable = Cable { host, process, network, orphan: None, is_dark: false, ends: 2, number };
        state.cables.push(cable);
        let net = self.net.clone();
        let far = Plug { end: Some(far), net: net.clone(), number, tap: answered, is_host: false };
        state.ports[process].arrivals.push(Box::new(far));
        let near = Plug { end: Some(near), net, number, tap: sent, is_host: true };
        Some(Ok(Box::new(near)))
    }
}

impl Plug {
    fn end(&mut self) -> Option<&mut End> {
        self.end.as_mut()
    }

    fn now(&self) -> Instant {
        self.net.lock().now
    }
}

impl Stream for Plug {
    fn receive(&mut self) -> Received {
        self.end().map_or(Received::End, Stream::receive)
    }

    fn bytes(&self) -> &[u8] {
        self.end.as_ref().map_or(&[], Stream::bytes)
    }

    fn consume(&mut self, count: usize) {
        if let Some(end) = self.end() {
            end.consume(count);
        }
    }

    fn receive_into(&mut self, into: &[Segment]) -> Received {
        self.end().map_or(Received::End, |end| end.receive_into(into))
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, Broken> {
        let Some(end) = &mut self.end else { return Ok(0) };
        let count = end.send(headers, stretches, has_more)?;
        if self.tap.is_some() && count > 0 {
            let now = self.now();
            if let Some(tap) = &mut self.tap {
                tap.sent(now, headers, stretches, count);
            }
        }
        Ok(count)
    }

    fn released(&mut self) -> u64 {
        self.end().map_or(u64::MAX, Stream::released)
    }

    fn shut_down(&mut self) {
        if let Some(end) = self.end() {
            end.shut_down();
        }
    }

    fn abandon(&mut self) {
        if let Some(end) = self.end() {
            end.abandon();
        }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Nothing
    }

    fn arm(&mut self, wants_bytes: bool, wants_room: bool) -> bool {
        self.end().is_some_and(|end| end.arm(wants_bytes, wants_room))
    }

    fn peer(&self) -> String {
        format!("connection {}", self.number)
    }
}

impl Drop for Plug {
    fn drop(&mut self) {
        let mut end = self.end.take();
        let mut state = self.net.lock();
        if let Some(cable) = state.cable(self.number) {
            cable.ends -= 1;
            if cable.is_dark && !self.is_host {
                // Without power nothing says that it has ended.
                cable.orphan = end.take();
            }
        }
        drop(state);
        drop(end);
    }
}
