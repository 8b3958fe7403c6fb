//! Network between hosts and target processes: connections, and links that fail.
//!
//! ```text
//!   host ── connect ──▶ link (up, silent) ──▶ port (refuses, listens, dark) ──▶ arrivals ──▶ process
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    Instant, Memory, Random, RecvResult, Segment, SendSlice, Span, Stream, StreamError, WakeSource,
};
use tenmil_dma::RegionTable;
use tenmil_nvme_fabrics::{Connector, PendingConnect};
use tenmil_sim::sim_network::{
    self, LinkFault, LinkOptions, LinkTransferDirection, NetworkOptions, SimStream,
};

use crate::pdu_recorder::{CommandRanges, PduRecorder};
use crate::run_history::RunHistory;

/// The network. Clones refer to the same network.
#[derive(Clone)]
pub(crate) struct ClusterNetwork(Arc<Mutex<NetworkState>>);

/// Options of all connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionOptions {
    /// Delay of each byte.
    pub(crate) delay: Span,
    /// Maximum additional delay.
    pub(crate) jitter: Span,
    /// Whether data are split at random positions.
    pub(crate) splits: bool,
    /// Maximum time that sent memory is still read after the send.
    pub(crate) release: Span,
}

/// State of the port of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortPower {
    /// The machine is up, but no process listens.
    Refuses,
    /// The process accepts connections.
    Listens,
    /// The machine has no power.
    Dark,
}

/// Disturbance of the connections between a host and a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionFault {
    /// The connections are reset.
    Reset,
    /// All data are lost silently.
    Vanish,
    /// Data in this direction are delayed by this time, in order.
    Delay(LinkTransferDirection, Span),
}

struct NetworkState {
    now: Instant,
    random: Random,
    options: ConnectionOptions,
    cables: Vec<SimConnection>,
    ports: Vec<PortState>,
    /// End of the partition between each host and process.
    silent: Vec<Vec<Instant>>,
    history: Arc<Mutex<RunHistory>>,
    has_packets: bool,
    connections: u64,
}

struct PortState {
    port: PortPower,
    /// Memory of the process's ends of connections.
    memory: Arc<dyn Memory>,
    arrivals: Vec<Box<dyn Stream>>,
}

/// A connection.
struct SimConnection {
    host: usize,
    process: usize,
    network: sim_network::SimNetwork,
    /// End of the process, left behind by a machine that has lost its power.
    orphan: Option<SimStream>,
    is_dark: bool,
    /// Number of ends in use.
    ends: u32,
    number: u64,
}

/// One end of a connection.
struct ConnectionEnd {
    end: Option<SimStream>,
    net: ClusterNetwork,
    number: u64,
    tap: Option<PduRecorder>,
    is_host: bool,
}

struct HostConnector {
    net: ClusterNetwork,
    host: usize,
    process: usize,
    memory: RegionTable,
}

struct PendingClusterConnect {
    net: ClusterNetwork,
    host: usize,
    process: usize,
    memory: RegionTable,
    begun: Instant,
    until: Instant,
}

/// Time to open a connection.
const ROUND_TRIP: Span = Span::from_us(200);
const INBOX_BYTES: usize = 16 << 10;

impl ClusterNetwork {
    /// Creates a network for a number of hosts and processes, without connections.
    pub(crate) fn new(
        options: ConnectionOptions,
        (hosts, processes): (usize, usize),
        random: Random,
        history: Arc<Mutex<RunHistory>>,
    ) -> Self {
        let nothing: Arc<dyn Memory> = Arc::new(RegionTable::new(1));
        let port = || {
            let memory = Arc::clone(&nothing);
            PortState { port: PortPower::Refuses, memory, arrivals: Vec::new() }
        };
        let has_packets = history.lock().is_ok_and(|history| history.records_pdus());
        Self(Arc::new(Mutex::new(NetworkState {
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

    /// Connector from a host to a process. The data of the host lie in `memory`.
    pub(crate) fn connector(
        &self,
        host: usize,
        process: usize,
        memory: &RegionTable,
    ) -> Box<dyn Connector> {
        let (net, memory) = (self.clone(), memory.clone());
        Box::new(HostConnector { net, host, process, memory })
    }

    /// Advances the time.
    pub(crate) fn advance_to(&self, now: Instant) {
        let mut state = self.lock();
        state.now = now;
        for cable in &mut state.cables {
            cable.network.advance(now);
            // Data that arrive at a machine without power are lost.
            if let Some(end) = &mut cable.orphan
                && matches!(end.receive(), RecvResult::Bytes(_))
            {
                let count = end.buffered().len();
                end.consume(count);
            }
        }
        state.cables.retain(|cable| cable.ends > 0);
    }

    /// Time of the next arrival.
    pub(crate) fn wake_at(&self) -> Instant {
        let state = self.lock();
        let live = state.cables.iter().filter(|cable| !cable.is_dark);
        live.map(|cable| cable.network.wake_at()).min().unwrap_or(Instant::NEVER)
    }

    /// Removes and returns the connections that the process has not accepted yet.
    pub(crate) fn accept_connections(&self, process: usize) -> Vec<Box<dyn Stream>> {
        std::mem::take(&mut self.lock().ports[process].arrivals)
    }

    /// Lets a process accept connections. Its data lie in `memory`.
    pub(crate) fn listen(&self, process: usize, memory: &RegionTable) {
        self.lock().ports[process].memory = Arc::new(memory.clone());
        self.set_port(process, PortPower::Listens);
    }

    /// Sets the state of a port. A dark port does not answer; when it is powered again, earlier
    /// connections are reset.
    pub(crate) fn set_port(&self, process: usize, port: PortPower) {
        let mut state = self.lock();
        let was = std::mem::replace(&mut state.ports[process].port, port);
        let arrivals = match port {
            PortPower::Listens => Vec::new(),
            _ => std::mem::take(&mut state.ports[process].arrivals),
        };
        let mut orphans = Vec::new();
        for cable in state.cables.iter_mut().filter(|cable| cable.process == process) {
            if port == PortPower::Dark {
                cable.is_dark = true;
                cable.network.inject_fault(LinkTransferDirection::Downstream, LinkFault::BlackHole);
            } else if was == PortPower::Dark {
                cable.network.cut_links();
                orphans.extend(cable.orphan.take());
                cable.is_dark = false;
            }
        }
        drop(state);
        // Dropping an end takes the lock, so it happens outside.
        drop(arrivals);
        drop(orphans);
    }

    /// Partitions a host and a process for a while. Data sent meanwhile arrive afterwards.
    pub(crate) fn partition(&self, host: usize, process: usize, span: Span) {
        let mut state = self.lock();
        let until = state.now.after(span);
        let silent = &mut state.silent[host][process];
        *silent = until.max(*silent);
        for cable in state.connections_between(host, process) {
            for direction in [LinkTransferDirection::Upstream, LinkTransferDirection::Downstream] {
                cable.network.inject_fault(direction, LinkFault::Freeze(span));
            }
        }
    }

    /// Disturbs the existing connections.
    pub(crate) fn inject_fault(&self, host: usize, process: usize, harm: ConnectionFault) {
        let mut state = self.lock();
        for cable in state.connections_between(host, process) {
            match harm {
                ConnectionFault::Reset => cable.network.cut_links(),
                ConnectionFault::Vanish => {
                    for direction in
                        [LinkTransferDirection::Upstream, LinkTransferDirection::Downstream]
                    {
                        cable.network.inject_fault(direction, LinkFault::BlackHole);
                    }
                }
                ConnectionFault::Delay(direction, span) => {
                    cable.network.inject_fault(direction, LinkFault::Freeze(span));
                }
            }
        }
    }

    /// Ends all partitions.
    pub(crate) fn end_partitions(&self) {
        let mut state = self.lock();
        let now = state.now;
        for silent in state.silent.iter_mut().flatten() {
            *silent = now;
        }
    }

    /// Segments of hosts that were reused before they were released.
    pub(crate) fn reused_unreleased_memory(&self) -> Vec<String> {
        self.lock()
            .cables
            .iter()
            .flat_map(|cable| cable.network.changed_unreleased_memory())
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NetworkState {
    fn connections_between(
        &mut self,
        host: usize,
        process: usize,
    ) -> impl Iterator<Item = &mut SimConnection> {
        let is_it =
            move |cable: &&mut SimConnection| cable.host == host && cable.process == process;
        self.cables.iter_mut().filter(is_it)
    }

    fn connection_by_number(&mut self, number: u64) -> Option<&mut SimConnection> {
        self.cables.iter_mut().find(|cable| cable.number == number)
    }
}

impl Connector for HostConnector {
    fn begin_connect(&mut self, now: Instant, until: Instant) -> Box<dyn PendingConnect> {
        let Self { net, host, process, memory } = self;
        let (net, memory) = (net.clone(), memory.clone());
        Box::new(PendingClusterConnect {
            net,
            host: *host,
            process: *process,
            memory,
            begun: now,
            until,
        })
    }

    fn peer(&self) -> String {
        format!("target {}", self.process)
    }
}

impl PendingConnect for PendingClusterConnect {
    /// A dark port or a partition does not answer until the timeout; a closed port refuses after one
    /// round trip.
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        let mut state = self.net.lock();
        let port = state.ports[self.process].port;
        if port == PortPower::Dark || state.silent[self.host][self.process] > now {
            let why = || StreamError("no response in time".to_owned());
            return (now >= self.until).then(|| Err(why()));
        }
        if now < self.begun.after(ROUND_TRIP) {
            return None;
        }
        if port == PortPower::Refuses {
            return Some(Err(StreamError("connection refused".to_owned())));
        }
        let ConnectionOptions { delay, jitter, splits, release } = state.options;
        let line = LinkOptions { splits, delay, jitter, ..LinkOptions::default() };
        let options = NetworkOptions {
            seed: state.random.next_u64(),
            there: line.clone(),
            back: line,
            inbox_bytes: INBOX_BYTES,
            release_jitter: release,
            ..NetworkOptions::default()
        };
        let here: Arc<dyn Memory> = Arc::new(self.memory.clone());
        // The end of the process sends from and receives into its own memory.
        let there: Arc<dyn Memory> = Arc::clone(&state.ports[self.process].memory);
        let (near, far, network) = sim_network::connected_pair(options, here, there);
        network.advance(now);
        state.connections += 1;
        let number = state.connections;
        let (host, process) = (self.host, self.process);
        let names = (format!("host {host}"), format!("target {process} ({number})"));
        let commands = CommandRanges::default();
        let tap = |names: (String, String)| {
            let shared = (host, Arc::clone(&commands));
            let history = Arc::clone(&state.history);
            state.has_packets.then(|| PduRecorder::new(history, shared, names))
        };
        let sent = tap(names.clone());
        let completed = tap((names.1, names.0));
        let cable =
            SimConnection { host, process, network, orphan: None, is_dark: false, ends: 2, number };
        state.cables.push(cable);
        let net = self.net.clone();
        let far = ConnectionEnd {
            end: Some(far),
            net: net.clone(),
            number,
            tap: completed,
            is_host: false,
        };
        state.ports[process].arrivals.push(Box::new(far));
        let near = ConnectionEnd { end: Some(near), net, number, tap: sent, is_host: true };
        Some(Ok(Box::new(near)))
    }
}

impl ConnectionEnd {
    fn stream_end(&mut self) -> Option<&mut SimStream> {
        self.end.as_mut()
    }

    fn now(&self) -> Instant {
        self.net.lock().now
    }
}

impl Stream for ConnectionEnd {
    fn receive(&mut self) -> RecvResult {
        self.stream_end().map_or(RecvResult::Eof, Stream::receive)
    }

    fn buffered(&self) -> &[u8] {
        self.end.as_ref().map_or(&[], Stream::buffered)
    }

    fn consume(&mut self, count: usize) {
        if let Some(end) = self.stream_end() {
            end.consume(count);
        }
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        self.stream_end().map_or(RecvResult::Eof, |end| end.receive_into(into))
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        self.stream_end()
            .map_or(RecvResult::Eof, |end| end.receive_into_and_following(into, following))
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        let Some(end) = &mut self.end else { return Ok(0) };
        let count = end.send(headers, stretches, has_more)?;
        if self.tap.is_some() && count > 0 {
            let now = self.now();
            if let Some(tap) = &mut self.tap {
                tap.record_sent(now, headers, stretches, count);
            }
        }
        Ok(count)
    }

    fn released_bytes(&mut self) -> u64 {
        self.stream_end().map_or(u64::MAX, Stream::released_bytes)
    }

    fn shutdown_write(&mut self) {
        if let Some(end) = self.stream_end() {
            end.shutdown_write();
        }
    }

    fn abort(&mut self) {
        if let Some(end) = self.stream_end() {
            end.abort();
        }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        self.stream_end().is_some_and(|end| end.arm(wants_bytes, wants_space))
    }

    fn peer_description(&self) -> String {
        format!("connection {}", self.number)
    }
}

impl Drop for ConnectionEnd {
    fn drop(&mut self) {
        let mut end = self.end.take();
        let mut state = self.net.lock();
        if let Some(cable) = state.connection_by_number(self.number) {
            cable.ends -= 1;
            if cable.is_dark && !self.is_host {
                // Without power, no end of the connection is signaled.
                cable.orphan = end.take();
            }
        }
        drop(state);
        drop(end);
    }
}
