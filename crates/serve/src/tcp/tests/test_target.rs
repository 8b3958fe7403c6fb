//! Service, hosts of a few lines, and in-memory pipes between them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, Instant, Memory, RecvResult, SecureChannel, Segment, SendSlice, Span, Stream,
    StreamError, WakeSource,
};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_nvme_tcp::{
    Connection, DataDirection, EventQueue, HostConfig, HostConnection, HostEvent, NegotiatedParams,
    PayloadDigest, SendPiece,
};
use tenmil_wire::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectData, PropertyGet, PropertySet, PropertySize,
};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{Command, Completion, Status, TypedCommand};

use crate::tcp::{
    AllowedHosts, ControllerModel, Port, Service, ServiceLimits, SubsystemExportConfig,
    SubsystemSecurity, TargetConnection, TargetEvent,
};

pub(super) const NQN: &str = "nqn.2026-01.org.tenmil:test";
pub(super) const HOST: &str = "nqn.2026-01.org.tenmil:host";
/// CC of an enabled controller: EN 1, IOSQES 6, IOCQES 4.
pub(super) const ENABLED: u64 = 4 << 20 | 6 << 16 | 1;
pub(super) const BLOCKS: u64 = 4096;

/// One direction of a pipe.
#[derive(Debug, Default)]
struct PipeBuffer {
    bytes: Vec<u8>,
    is_closed: bool,
    /// Capacity in bytes.
    room: usize,
}

/// One end of a pipe.
pub(super) struct TestStream {
    regions: RegionTable,
    incoming: Arc<Mutex<PipeBuffer>>,
    outgoing: Arc<Mutex<PipeBuffer>>,
    inbox: Vec<u8>,
    taken: u64,
    released: u64,
    /// Largest number of bytes of one receive.
    most: usize,
    traits: StreamProperties,
}

/// Properties of a pipe, as reported to the service.
#[derive(Clone, Debug, Default)]
pub(super) struct StreamProperties {
    /// While set, the kernel still references the sent buffers.
    pub(super) reads: Arc<AtomicBool>,
    pub(super) is_tied: bool,
    pub(super) here: Option<SocketAddr>,
    /// Address of the peer.
    pub(super) peer: Option<SocketAddr>,
    /// Secure channel that carries the pipe.
    pub(super) channel: Option<SecureChannel>,
}

/// Capacity of the inbox.
const INBOX: usize = 32 << 10;

impl TestStream {
    pub(super) fn pair(regions: &RegionTable) -> (Self, Self) {
        let half = || Arc::new(Mutex::new(PipeBuffer { room: 1 << 20, ..PipeBuffer::default() }));
        let (up, down) = (half(), half());
        let end = |incoming: &Arc<Mutex<PipeBuffer>>, outgoing: &Arc<Mutex<PipeBuffer>>| Self {
            regions: regions.clone(),
            incoming: Arc::clone(incoming),
            outgoing: Arc::clone(outgoing),
            inbox: Vec::new(),
            taken: 0,
            released: 0,
            most: INBOX,
            traits: StreamProperties::default(),
        };
        (end(&down, &up), end(&up, &down))
    }

    pub(super) fn with_traits(mut self, traits: &StreamProperties) -> Self {
        self.traits = traits.clone();
        self
    }

    /// Limits one receive to `most` bytes, and the capacity to twice as many.
    pub(super) fn set_capacity(&mut self, most: usize) {
        self.most = most;
        self.incoming.lock().unwrap().room = 2 * most;
    }
}

impl Drop for TestStream {
    fn drop(&mut self) {
        self.outgoing.lock().unwrap().is_closed = true;
        self.incoming.lock().unwrap().is_closed = true;
    }
}

impl Stream for TestStream {
    fn receive(&mut self) -> RecvResult {
        let mut half = self.incoming.lock().unwrap();
        let count = half.bytes.len().min(self.most).min(INBOX - self.inbox.len().min(INBOX));
        self.inbox.extend(half.bytes.drain(..count));
        match count {
            0 if half.is_closed && half.bytes.is_empty() => RecvResult::Eof,
            0 => RecvResult::WouldBlock,
            count => RecvResult::Bytes(count),
        }
    }

    fn buffered(&self) -> &[u8] {
        &self.inbox
    }

    fn consume(&mut self, count: usize) {
        self.inbox.drain(..count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        self.receive_into_and_following(into, 0)
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        assert!(self.inbox.is_empty(), "what has come comes first");
        let mut half = self.incoming.lock().unwrap();
        let first = into[0];
        let len = first.len_bytes as usize;
        let count = half.bytes.len().min(len + following).min(self.most);
        if count == 0 {
            return if half.is_closed { RecvResult::Eof } else { RecvResult::WouldBlock };
        }
        let mut bytes: Vec<u8> = half.bytes.drain(..count).collect();
        self.inbox = bytes.split_off(count.min(len));
        let place = first.slice(0, u32::try_from(bytes.len()).unwrap()).unwrap();
        self.regions.store(place, &bytes).unwrap();
        RecvResult::Bytes(count)
    }

    fn send(
        &mut self,
        headers: &[u8],
        slices: &[SendSlice],
        _: bool,
    ) -> Result<usize, StreamError> {
        let mut half = self.outgoing.lock().unwrap();
        if half.is_closed {
            return Err(StreamError("the pipe is closed".to_owned()));
        }
        let mut bytes = Vec::new();
        for stretch in slices {
            match *stretch {
                SendSlice::Headers { at, len_bytes } => {
                    bytes.extend(&headers[at as usize..][..len_bytes as usize]);
                }
                SendSlice::Memory(segment) => {
                    let mut part = vec![0; segment.len_bytes as usize];
                    self.regions.load(segment, &mut part).unwrap();
                    bytes.extend(part);
                }
            }
        }
        let room = half.room.saturating_sub(half.bytes.len());
        bytes.truncate(room);
        self.taken += bytes.len() as u64;
        half.bytes.extend(&bytes);
        Ok(bytes.len())
    }

    fn released_bytes(&mut self) -> u64 {
        if !self.traits.reads.load(Ordering::Relaxed) {
            self.released = self.taken;
        }
        self.released
    }

    fn shutdown_write(&mut self) {
        self.outgoing.lock().unwrap().is_closed = true;
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn arm(&mut self, _: bool, _: bool) -> bool {
        false
    }

    fn is_thread_bound(&self) -> bool {
        self.traits.is_tied
    }

    fn peer_description(&self) -> String {
        self.traits.peer.map_or_else(|| "pipe".to_owned(), |peer| peer.to_string())
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.traits.here
    }

    fn secure_channel(&self) -> Option<&SecureChannel> {
        self.traits.channel.as_ref()
    }
}

/// Connection of a host.
pub(super) struct TestHostConnection {
    pub(super) end: HostConnection,
    pub(super) pipe: Option<Box<dyn Stream>>,
    memory: ByteDigest,
    events: EventQueue<HostEvent>,
    /// Completed commands, and the data they received.
    pub(super) done: BTreeMap<u16, (Completion, Vec<u8>)>,
    pub(super) terms: Option<NegotiatedParams>,
    /// All bytes sent and received.
    pub(super) sent: Vec<u8>,
    pub(super) received: Vec<u8>,
    pub(super) is_deaf: bool,
    /// Command whose data are corrupted in transit.
    pub(super) damaged: Option<u16>,
    /// Number of bytes after which the host sends nothing more, and stays connected.
    pub(super) mute_after: Option<usize>,
    /// Number of bytes after which the connection is cut: sent bytes if `true`, received bytes
    /// otherwise.
    pub(super) allowance: Option<(bool, usize)>,
}

#[derive(Default)]
struct ByteDigest(BTreeMap<u16, Vec<u8>>);

impl PayloadDigest for ByteDigest {
    fn data_digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        tenmil_wire::tcp::crc32c(&self.0[&tag][offset as usize..][..len_bytes as usize])
    }
}

impl TestHostConnection {
    pub(super) fn new(config: HostConfig, pipe: Box<dyn Stream>, now: Instant) -> Self {
        Self {
            end: HostConnection::new(config, now),
            pipe: Some(pipe),
            memory: ByteDigest::default(),
            events: EventQueue::with_capacity(16),
            done: BTreeMap::new(),
            terms: None,
            sent: Vec::new(),
            received: Vec::new(),
            is_deaf: false,
            damaged: None,
            mute_after: None,
            allowance: None,
        }
    }

    /// Number of bytes sent or received.
    pub(super) fn bytes_transferred(&self, is_upwards: bool) -> usize {
        if is_upwards { self.sent.len() } else { self.received.len() }
    }

    /// Submits a command with its data, or with a buffer for the received data.
    pub(super) fn submit(&mut self, command: &Command, data: DataDirection, bytes: &[u8]) -> u16 {
        let tag = self.end.next_tag().expect("there is room");
        let bytes = match data {
            DataDirection::ToHost(len) => vec![0xa5; len as usize],
            _ => bytes.to_vec(),
        };
        self.memory.0.insert(tag, bytes);
        self.end.submit(command, data, &self.memory).expect("there is room")
    }

    pub(super) fn poll_once(&mut self, now: Instant) -> bool {
        let Some(pipe) = &mut self.pipe else { return false };
        let mut is_busy = false;
        self.end.fill_send_queue(&self.memory);
        let mut bytes = Vec::new();
        for piece in self.end.send_pieces() {
            match *piece {
                SendPiece::Headers { at, len_bytes } => {
                    bytes.extend(&self.end.header_bytes()[at as usize..][..len_bytes as usize]);
                }
                SendPiece::Payload { tag, offset, len_bytes } => {
                    bytes.extend(&self.memory.0[&tag][offset as usize..][..len_bytes as usize]);
                    if self.damaged == Some(tag)
                        && let Some(last) = bytes.last_mut()
                    {
                        *last ^= 1;
                    }
                }
            }
        }
        if let Some(most) = self.mute_after {
            bytes.truncate(most - self.sent.len());
        }
        if !bytes.is_empty() {
            if let Some((true, most)) = self.allowance {
                bytes.truncate(most - self.sent.len());
            }
            let whole =
                SendSlice::Headers { at: 0, len_bytes: u32::try_from(bytes.len()).unwrap() };
            let Ok(count) = pipe.send(&bytes, &[whole], false) else {
                self.pipe = None;
                return true;
            };
            self.sent.extend(&bytes[..count]);
            self.end.record_sent(count, &mut self.events);
            is_busy |= count > 0;
            if self.allowance == Some((true, self.sent.len())) {
                self.pipe = None;
                return true;
            }
        }
        if !self.is_deaf {
            let before = pipe.buffered().len();
            is_busy |= matches!(pipe.receive(), RecvResult::Bytes(_));
            self.received.extend(&pipe.buffered()[before..]);
            if let Some((false, most)) = self.allowance
                && self.received.len() >= most
            {
                self.pipe = None;
                return true;
            }
        }
        loop {
            let taken = self.end.receive(now, pipe.buffered(), &mut self.events);
            let has_events = !self.events.as_slice().is_empty();
            for event in
                self.events.as_slice().iter().flat_map(|event| event.split_read_completed())
            {
                match event {
                    HostEvent::Open(terms) => self.terms = Some(terms),
                    HostEvent::Data { placement, at } => {
                        let from = &pipe.buffered()[at as usize..][..placement.len_bytes as usize];
                        let into = self.memory.0.get_mut(&placement.tag).unwrap();
                        into[placement.offset as usize..][..from.len()].copy_from_slice(from);
                    }
                    HostEvent::Completed { tag, completion, .. } => {
                        self.done.insert(tag, (completion, self.memory.0[&tag].clone()));
                    }
                    HostEvent::Ended(_) | HostEvent::ReadCompleted { .. } => {}
                }
            }
            self.events.clear();
            pipe.consume(taken);
            if taken == 0 && !has_events {
                return is_busy;
            }
            is_busy = true;
        }
    }
}

/// Service with all its connections.
pub(super) struct TestTarget {
    pub(super) regions: RegionTable,
    pub(super) service: Service,
    pub(super) now: Instant,
    pub(super) guests: Vec<TargetConnection>,
    pub(super) lines: Vec<TestHostConnection>,
    pub(super) new_events: Vec<TargetEvent>,
    /// Limit of bytes per receive on new connections; the capacity of their pipes is twice as
    /// large.
    pub(super) narrow: Option<usize>,
    /// Properties of new connections.
    pub(super) traits: StreamProperties,
    /// `allowance` of new connections.
    pub(super) allowance: Option<(bool, usize)>,
}

pub(super) fn service_limits() -> ServiceLimits {
    ServiceLimits {
        memory_bytes: 8 << 20,
        connections_max: 16,
        transfer_bytes_max: 128 << 10,
        io_queues_max: 4,
        ..ServiceLimits::default()
    }
}

impl TestTarget {
    pub(super) fn new() -> Self {
        Self::with_options(service_limits(), |config| config)
    }

    /// Creates a service; returns also its subsystem.
    pub(super) fn with_subsystem() -> (Self, Subsystem) {
        let mut subsystem = None;
        let rig = Self::with_options(service_limits(), |config| {
            subsystem = Some(config.subsystem.clone());
            config
        });
        (rig, subsystem.unwrap())
    }

    pub(super) fn with_options(
        limits: ServiceLimits,
        change: impl FnOnce(SubsystemExportConfig) -> SubsystemExportConfig,
    ) -> Self {
        let regions = RegionTable::new(64);
        let service = Service::new(&regions, limits).unwrap();
        let medium: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, 512, BLOCKS).unwrap());
        let config = SubsystemConfig {
            nqn: NQN.to_owned(),
            ..SubsystemConfig::new("TEST", vec![NamespaceConfig::new(medium)])
        };
        let subsystem = Subsystem::new(config).unwrap();
        let config = SubsystemExportConfig {
            subsystem,
            nqn: NQN.to_owned(),
            hosts: AllowedHosts::Any,
            ports: BTreeMap::from([(1, Vec::new())]),
            model: ControllerModel::Dynamic,
            masks: BTreeMap::new(),
            security: SubsystemSecurity::default(),
        };
        service.add_port(1, Port { address: None, ..Port::default() });
        service.add_subsystem(change(config)).unwrap();
        let now = Instant { ns: 1_000_000 };
        let (guests, lines, new_events) = (Vec::new(), Vec::new(), Vec::new());
        let traits = StreamProperties::default();
        Self {
            regions,
            service,
            now,
            guests,
            lines,
            new_events,
            narrow: None,
            traits,
            allowance: None,
        }
    }

    /// Opens a connection; returns its index.
    pub(super) fn open_connection(&mut self, config: HostConfig) -> usize {
        let (mut near, mut far) = TestStream::pair(&self.regions);
        if let Some(most) = self.narrow {
            near.set_capacity(most);
            far.set_capacity(most);
        }
        far.traits = self.traits.clone();
        let guest = self.service.accept_stream(Box::new(far), 1, self.now).unwrap();
        self.guests.push(guest);
        let mut line = TestHostConnection::new(config, Box::new(near), self.now);
        line.allowance = self.allowance;
        self.lines.push(line);
        self.run_until_idle();
        self.lines.len() - 1
    }

    /// Runs everything until nothing has work to do. Several idle rounds are needed, because a
    /// fused pair waits for an iteration of other connections.
    pub(super) fn run_until_idle(&mut self) {
        let mut idle = 0;
        for _ in 0..100_000 {
            let mut is_busy = false;
            for guest in &mut self.guests {
                is_busy |= guest.poll_once(self.now);
            }
            let before = self.guests.len();
            self.guests.retain(|guest| !guest.is_closed());
            is_busy |= self.guests.len() != before;
            for line in &mut self.lines {
                is_busy |= line.poll_once(self.now);
            }
            while let Some(new_events) = self.service.next_event() {
                self.new_events.push(new_events);
            }
            idle = if is_busy { 0 } else { idle + 1 };
            if idle > 2 {
                return;
            }
        }
        panic!("it never comes to rest");
    }

    pub(super) fn advance_time(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.run_until_idle();
    }

    /// Submits a command and waits for its completion.
    pub(super) fn execute_command(
        &mut self,
        line: usize,
        command: &Command,
        data: DataDirection,
        bytes: &[u8],
    ) -> (Completion, Vec<u8>) {
        let tag = self.lines[line].submit(command, data, bytes);
        self.run_until_idle();
        self.lines[line].done.remove(&tag).expect("it has ended")
    }

    pub(super) fn execute_connect(
        &mut self,
        line: usize,
        connect: &Connect,
        data: &ConnectData,
    ) -> Completion {
        let bytes = data.as_bytes();
        let len = u32::try_from(bytes.len()).unwrap();
        self.execute_command(line, &connect.to_command(), DataDirection::FromHost(len), bytes).0
    }

    /// Submits a Connect; returns its tag.
    pub(super) fn submit_connect(
        &mut self,
        line: usize,
        connect: &Connect,
        data: &ConnectData,
    ) -> u16 {
        let bytes = data.as_bytes();
        let len = u32::try_from(bytes.len()).unwrap();
        let tag =
            self.lines[line].submit(&connect.to_command(), DataDirection::FromHost(len), bytes);
        self.run_until_idle();
        tag
    }

    pub(super) fn get_property(
        &mut self,
        line: usize,
        at: usize,
        size: PropertySize,
    ) -> Completion {
        let ofst = u32::try_from(at).unwrap();
        self.execute_command(
            line,
            &PropertyGet { size, ofst }.to_command(),
            DataDirection::None,
            &[],
        )
        .0
    }

    pub(super) fn set_property(&mut self, line: usize, at: usize, value: u64) -> Completion {
        let ofst = u32::try_from(at).unwrap();
        let set = PropertySet { size: PropertySize::Four, ofst, value };
        self.execute_command(line, &set.to_command(), DataDirection::None, &[]).0
    }

    /// Connects a host and enables its controller; returns the index of its admin connection and
    /// the controller ID.
    pub(super) fn connect_admin_queue(&mut self) -> (usize, u16) {
        let line = self.open_connection(admin_config());
        let completion =
            self.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
        assert_eq!(completion.status(), Status::SUCCESS);
        let [low, high, ..] = completion.dw0().to_le_bytes();
        assert_eq!(self.set_property(line, offset::CC, ENABLED).status(), Status::SUCCESS);
        let csts = self.get_property(line, offset::CSTS, PropertySize::Four);
        assert_eq!(csts.result(), 1, "it is ready");
        (line, u16::from_le_bytes([low, high]))
    }

    /// Connects an I/O queue of a controller.
    pub(super) fn connect_io_queue(&mut self, cntlid: u16, qid: u16) -> usize {
        let line = self.open_connection(io_config());
        let completion = self.execute_connect(line, &io_connect(qid), &connect_data(cntlid));
        assert_eq!(completion.status(), Status::SUCCESS);
        line
    }

    /// Connects a host with this number and an I/O queue; returns both connections.
    pub(super) fn connect_host_with_io_queue(&mut self, number: u8) -> (usize, usize) {
        let data =
            |cntlid| -> ConnectData { connect_data(cntlid).with(|data| data.hostid([number; 16])) };
        let admin = self.open_connection(admin_config());
        let completion = self.execute_connect(admin, &admin_connect(), &data(0xffff));
        assert_eq!(completion.status(), Status::SUCCESS);
        let cntlid = u16::try_from(completion.dw0()).unwrap();
        self.set_property(admin, offset::CC, ENABLED);
        let io = self.open_connection(io_config());
        assert_eq!(
            self.execute_connect(io, &io_connect(1), &data(cntlid)).status(),
            Status::SUCCESS
        );
        (admin, io)
    }

    /// Checks that all memory, controllers and connections are released.
    pub(super) fn assert_all_released(&mut self) {
        self.run_until_idle();
        assert_eq!(self.guests.len(), 0, "{:?}", self.guests);
        assert_eq!(self.service.connection_count(), 0);
        assert_eq!(self.service.association_count(), 0);
        let budget = self.service.buffer_pool();
        assert_eq!(budget.free_bytes(), budget.size_bytes());
        assert_eq!(budget.waiting_connections(), 0);
    }
}

pub(super) fn admin_config() -> HostConfig {
    HostConfig { depth: 32, in_capsule_bytes: 8192, ..HostConfig::default() }
}

pub(super) fn io_config() -> HostConfig {
    HostConfig { depth: 128, in_capsule_bytes: 8192, ..HostConfig::default() }
}

pub(super) fn admin_connect() -> Connect {
    Connect { sqsize: 31, kato: 0, ..Connect::default() }
}

pub(super) fn io_connect(qid: u16) -> Connect {
    Connect { qid, sqsize: 128, disable_sq_flow_control: true, ..Connect::default() }
}

pub(super) fn connect_data(cntlid: u16) -> ConnectData {
    ConnectData::zeroed().with(|data| {
        data.hostid([7; 16])
            .cntlid(cntlid)
            .subnqn(Ascii::nul_padded(NQN))
            .hostnqn(Ascii::nul_padded(HOST))
    })
}

/// Read or Write of `blocks` blocks of namespace 1.
pub(super) fn read_or_write_command(opcode: u8, lba: u64, blocks: u32) -> Command {
    let [low, high] = [lba & 0xffff_ffff, lba >> 32].map(|half| u32::try_from(half).unwrap());
    Command::new(opcode).with_nsid(1).with_cdw10(low).with_cdw11(high).with_cdw12(blocks - 1)
}

pub(super) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0_u32..)
        .take(len)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 9) ^ seed).to_le_bytes()[0])
        .collect()
}
