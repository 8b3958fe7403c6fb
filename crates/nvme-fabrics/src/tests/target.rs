//! A minimal target: one namespace in memory, one association at a time, and faults controlled by the
//! test.

mod authentication;
mod commands;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use tenmil_base::{Instant, Memory, Random, RecvResult, SendSlice, Span, Stream, StreamError};
use tenmil_dma::RegionTable;
use tenmil_nvme_auth::TlsPsk;
use tenmil_nvme_tcp::{
    Connection, ControllerConfig, ControllerConnection, ControllerEvent, DataTransfer, EventQueue,
    PayloadDigest, SendPiece,
};
use tenmil_sim::sim_network::{
    self, LinkFault, LinkFaults, LinkTransferDirection, NetworkOptions, SimNetwork,
};
use tenmil_wire::admin::CrossControllerReset;
use tenmil_wire::cache_instance::CacheInstance;
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::log::ana::{self, AnaGroup, AnaHeader, AnaState};
use tenmil_wire::register::{Configuration, ControllerStatus};
use tenmil_wire::tcp::crc32c;
use tenmil_wire::{Command, Completion, IoOpcode, Status, TypedCommand};

use super::socket_like_stream::SocketLikeStream;
use crate::connector::{Connector, PendingConnect};
use authentication::ConnectionChap;
pub(super) use authentication::{TargetChap, Way};

pub(super) const BLOCK: usize = 512;
pub(super) const BLOCKS: usize = 4096;

/// A handle to the target and to the networks that lead to it.
#[derive(Clone)]
pub(super) struct Target(Arc<Mutex<TargetState>>);

/// State and behavior of the target. Every field may be changed at any time.
pub(super) struct TargetState {
    /// Contents, shared by targets that are paths to the same namespace.
    pub(super) disk: Arc<Mutex<Vec<u8>>>,
    /// Contents that would survive a power failure, if there is a volatile cache (VWC).
    pub(super) durable: Arc<Mutex<Vec<u8>>>,
    /// Blocks written and not flushed, by association. They are lost with it.
    pub(super) unflushed: BTreeMap<u16, BTreeSet<usize>>,
    /// Instance of the cache; with an instance, all associations share the cache, and it outlives them.
    pub(super) cache: Option<CacheInstance>,
    /// Number of executed flushes.
    pub(super) flushes: u64,
    /// ANA state, and whether its host is to be notified of a change.
    pub(super) ana: AnaState,
    pub(super) ana_has_changed: bool,
    /// ANA group of the namespace; groups before it have no access to the namespace.
    pub(super) ana_group: u32,
    /// Whether the host is to be notified that the namespace has changed.
    pub(super) namespace_has_changed: bool,
    /// The last byte of the namespace's NGUID; with zero it has no name.
    pub(super) nguid: u8,
    /// Whether the namespace may be attached to several controllers (NMIC).
    pub(super) is_shared: bool,
    /// Whether there is a namespace.
    pub(super) has_namespace: bool,
    /// Error of reads of the ANA log page.
    pub(super) refuses_ana_log: Option<Status>,
    /// Some I/O commands are executed much later, as far as the lifetime of the association permits.
    pub(super) late: Option<Random>,
    /// Commands are executed after this time.
    pub(super) delay: Option<Span>,
    held: Vec<DelayedCommand>,
    /// Associations, and the time until which each may execute its commands.
    until: BTreeMap<u16, Instant>,
    kato: Span,
    /// Keep Alives that it has executed.
    pub(super) keep_alives: u64,
    /// Admin commands received.
    pub(super) admin_commands: u64,
    now: Instant,
    /// Streams are refused.
    pub(super) refuses_connections: bool,
    /// Streams are neither opened nor refused.
    pub(super) ignores_connections: bool,
    /// Error of Connect.
    pub(super) refuses: Option<Status>,
    /// Error of the next Connect of an I/O queue.
    pub(super) refuses_queue: Option<Completion>,
    /// I/O commands are not completed.
    pub(super) withholds_completions: bool,
    /// Commands to namespace 0 are not answered.
    pub(super) ignores_probes: bool,
    /// A controller that is to stop (CC.EN is 0) does not confirm it.
    pub(super) ignores_disable: bool,
    /// Status of I/O commands.
    pub(super) status_override: Option<Status>,
    /// A command for this block ends its connection.
    pub(super) fatal_lba: Option<u64>,
    /// Admin commands with this opcode are not completed.
    pub(super) withheld_opcode: Option<u8>,
    /// Identifiers of I/O commands that were not answered, and those named by Aborts.
    pub(super) unanswered: Vec<u16>,
    pub(super) aborted: Vec<u16>,
    /// Fault of the stream of this number.
    pub(super) cut_fault: Option<(usize, LinkTransferDirection, u64)>,
    /// Targets whose controllers this target resets on request of their host (CCRL).
    siblings: Vec<Weak<Mutex<TargetState>>>,
    /// Index among these targets.
    salt: u16,
    /// Number of resets requested by its host.
    pub(super) resets: u64,
    /// Completion of a reset request, without a reset.
    pub(super) no_reset: Option<Completion>,
    /// Options of the next networks.
    pub(super) network: NetworkOptions,
    /// The networks, in the order of their creation.
    pub(super) networks: Vec<SimNetwork>,
    pub(super) config: ControllerConfig,
    pub(super) identity: IdentifyController,
    pub(super) mqes: u16,
    /// Maximum number of entries of an admin queue.
    pub(super) admin_entries: u16,
    /// Successful Connects, by queue.
    pub(super) connects: Vec<u16>,
    /// Number of received I/O commands.
    pub(super) received_io_commands: u64,
    /// Number of executed I/O commands.
    pub(super) executed: u64,
    /// Authentication, if hosts have to authenticate.
    pub(super) chap: Option<TargetChap>,
    /// Keys of secure channels with which each connection was opened; `None` for plaintext.
    pub(super) identities: Vec<Option<String>>,
    ends: Vec<TargetConnection>,
    association: u16,
    cc: Configuration,
    csts: ControllerStatus,
}

/// A command with delayed execution.
struct DelayedCommand {
    at: Instant,
    association: u16,
    stream: u64,
    tag: u16,
    command: Command,
    bytes: Vec<u8>,
}

/// How long an association may execute commands after its end (CQT).
pub(super) const CQT: Span = Span::from_ms(500);

/// Maximum execution time after the last sign of life of the host (Base 2.1 §9.6).
pub(super) const fn max_execution_time(kato: Span, is_traffic_based: bool) -> Span {
    let intervals = if is_traffic_based { 3 } else { 2 };
    Span { ns: intervals * kato.ns + CQT.ns }
}

/// Maximum number of live networks.
const NETWORKS_MAX: usize = 12;

/// A connection.
struct TargetConnection {
    number: u64,
    /// Asynchronous Event Requests.
    event_tags: Vec<u16>,
    stream: Box<dyn Stream>,
    end: ControllerConnection,
    events: EventQueue<ControllerEvent>,
    data: CommandPayloads,
    commands: BTreeMap<u16, Command>,
    /// Association and queue.
    queue: Option<(u16, u16)>,
    /// Identity of the key of its secure channel.
    identity: Option<String>,
    chap: ConnectionChap,
    is_over: bool,
}

#[derive(Default)]
struct CommandPayloads(BTreeMap<u16, Vec<u8>>);

impl PayloadDigest for CommandPayloads {
    fn data_digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        crc32c(&self.0[&tag][offset as usize..][..len_bytes as usize])
    }
}

impl Target {
    pub(super) fn new() -> Self {
        let identity = IdentifyController::zeroed().with(|id| {
            let id = id
                .sn(tenmil_wire::field_type::Ascii::new("1"))
                .mn(tenmil_wire::field_type::Ascii::new("t"));
            let id = id.sqes(0x66).cqes(0x44).nn(1).mdts(8).acl(3).aerl(3).kas(1).oncs(0);
            let id = id.sgl_support(1).ioccsz((4096 + 64) / 16).cqt(500);
            id.anars(true).ana_change_notices(true).anatt(2).anagrpmax(1).nanagrpid(1)
        });
        Self(Arc::new(Mutex::new(TargetState {
            disk: Arc::new(Mutex::new(vec![0; BLOCK * BLOCKS])),
            durable: Arc::new(Mutex::new(vec![0; BLOCK * BLOCKS])),
            unflushed: BTreeMap::new(),
            cache: None,
            flushes: 0,
            ana: AnaState::Optimized,
            ana_has_changed: false,
            ana_group: 1,
            namespace_has_changed: false,
            nguid: 1,
            is_shared: true,
            has_namespace: true,
            refuses_ana_log: None,
            siblings: Vec::new(),
            salt: 0,
            resets: 0,
            no_reset: None,
            late: None,
            delay: None,
            held: Vec::new(),
            until: BTreeMap::new(),
            kato: Span::default(),
            keep_alives: 0,
            admin_commands: 0,
            now: Instant::default(),
            refuses_connections: false,
            ignores_connections: false,
            refuses: None,
            refuses_queue: None,
            withholds_completions: false,
            ignores_probes: false,
            ignores_disable: false,
            status_override: None,
            fatal_lba: None,
            withheld_opcode: None,
            unanswered: Vec::new(),
            aborted: Vec::new(),
            cut_fault: None,
            network: NetworkOptions::default(),
            networks: Vec::new(),
            config: ControllerConfig { transfer_bytes_max: 1 << 20, ..ControllerConfig::default() },
            identity,
            mqes: 127,
            admin_entries: 32,
            connects: Vec::new(),
            received_io_commands: 0,
            executed: 0,
            chap: None,
            identities: Vec::new(),
            ends: Vec::new(),
            association: 0,
            cc: Configuration::zeroed(),
            csts: ControllerStatus::zeroed(),
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, TargetState> {
        self.0.lock().unwrap()
    }

    /// Connector from a host whose data is in `regions`.
    pub(super) fn connector(&self, regions: &RegionTable) -> Box<dyn Connector> {
        let keys = Vec::new();
        Box::new(TargetConnector { target: self.clone(), regions: regions.clone(), keys })
    }

    pub(super) fn step(&self, now: Instant) {
        let mut state = self.state();
        state.now = now;
        // Older networks do not change any more.
        for network in state.networks.iter().rev().take(NETWORKS_MAX) {
            network.advance(now);
        }
        let mut ends = std::mem::take(&mut state.ends);
        state.execute_due(&mut ends);
        for end in &mut ends {
            end.step(now, &mut state);
        }
        ends.retain(|end| !end.is_over);
        ends.append(&mut state.ends);
        state.ends = ends;
    }

    /// Number of open connections.
    pub(super) fn open_connection_count(&self) -> usize {
        self.state().ends.len()
    }

    /// Cuts all connections.
    pub(super) fn cut(&self) {
        self.state().networks.iter().for_each(SimNetwork::cut_links);
    }
}

struct TargetConnector {
    target: Target,
    regions: RegionTable,
    /// Identities of generated keys.
    keys: Vec<String>,
}

impl Connector for TargetConnector {
    fn begin_connect(&mut self, now: Instant, _: Instant) -> Box<dyn PendingConnect> {
        let mut state = self.target.state();
        if state.ignores_connections {
            return Box::new(ImmediateConnect(None));
        }
        if state.refuses_connections {
            return Box::new(ImmediateConnect(Some(Err(StreamError("no listener".into())))));
        }
        let identity = self.keys.first().cloned();
        if let (Some(identity), Some(chap)) = (&identity, &state.chap)
            && !chap.generated_identities.contains(identity)
        {
            let text = format!("no key for identity {identity}");
            return Box::new(ImmediateConnect(Some(Err(StreamError(text)))));
        }
        state.identities.push(identity.clone());
        let mut options = state.network.clone();
        if let Some((number, direction, at)) = state.cut_fault
            && number == state.networks.len()
        {
            let faults = LinkFaults::single(at, LinkFault::Cut);
            match direction {
                LinkTransferDirection::Upstream => options.there.faults = faults,
                LinkTransferDirection::Downstream => options.back.faults = faults,
            }
        }
        let (ours, theirs, network) = sim_network::connected_pair(
            options,
            Arc::new(self.regions.clone()),
            Arc::new(RegionTable::new(1)),
        );
        network.advance(now);
        state.networks.push(network);
        let end = TargetConnection {
            number: state.networks.len() as u64,
            event_tags: Vec::new(),
            stream: Box::new(theirs),
            end: ControllerConnection::new(state.config, now),
            events: EventQueue::with_capacity(64),
            data: CommandPayloads::default(),
            commands: BTreeMap::new(),
            queue: None,
            identity: identity.clone(),
            chap: ConnectionChap::default(),
            is_over: false,
        };
        state.ends.push(end);
        Box::new(ImmediateConnect(Some(Ok(Box::new(SocketLikeStream::new(ours, identity))))))
    }

    fn set_generated_keys(&mut self, keys: &[TlsPsk]) -> bool {
        self.keys = keys.iter().map(|key| key.identity.clone()).collect();
        true
    }

    fn peer(&self) -> String {
        "the target".into()
    }
}

struct ImmediateConnect(Option<Result<Box<dyn Stream>, StreamError>>);

impl PendingConnect for ImmediateConnect {
    fn poll(&mut self, _: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        self.0.take()
    }
}

impl Target {
    /// Makes the controllers of all these targets reset each other on request of their host.
    pub(super) fn enable_cross_controller_reset(targets: &[Self]) {
        for (salt, target) in (1..).zip(targets) {
            let others = targets.iter().filter(|other| !Arc::ptr_eq(&other.0, &target.0));
            let siblings = others.map(|other| Arc::downgrade(&other.0)).collect();
            let mut state = target.state();
            (state.salt, state.siblings) = (salt, siblings);
            state.identity = state.identity.clone().with(|id| id.ciu(1).ccrl(4));
        }
    }
}

impl TargetState {
    /// How long after the last sign of life of its host an association may execute commands: the maximum,
    /// as if that sign of life had been in transit for the maximum time.
    pub(super) fn max_execution_time(&self) -> Span {
        max_execution_time(self.kato, self.identity.tbkas())
    }

    /// Whether the host has enabled the controller.
    pub(super) fn is_enabled(&self) -> bool {
        self.cc.en()
    }

    /// Whether an association may still execute its commands.
    fn may_execute(&self, association: u16) -> bool {
        self.until.get(&association).is_some_and(|until| self.now < *until)
    }

    /// Whether an association accepts commands.
    fn is_alive(&self, association: u16) -> bool {
        self.until.get(&association).is_some_and(|until| self.now.after(CQT) < *until)
    }

    /// Identifies an association among those of all targets.
    fn cirn(&self, association: u16) -> u64 {
        u64::from(self.salt) << 16 | u64::from(association)
    }

    /// Ends an association of a sibling on request of its host.
    fn execute_cross_controller_reset(&mut self, command: &Command) -> Completion {
        self.resets += 1;
        if let Some(completion) = self.no_reset {
            return completion;
        }
        let CrossControllerReset { icid, cirn, .. } = CrossControllerReset::parse(command).unwrap();
        for sibling in self.siblings.iter().filter_map(Weak::upgrade) {
            let mut sibling = sibling.lock().unwrap();
            if sibling.cirn(icid) == cirn {
                sibling.until.insert(icid, self.now);
            }
        }
        Completion::new(0, Status::SUCCESS).with_dw0(1)
    }

    /// Records a sign of life of the host. An ended association stays ended.
    fn record_host_activity(&mut self, association: u16) {
        if self.is_alive(association) {
            let until = self.now.after(self.max_execution_time());
            self.until.insert(association, until);
        }
    }

    /// Records that the host of an association has closed its admin connection.
    fn record_admin_disconnect(&mut self, association: u16) {
        let latest = self.now.after(CQT);
        if let Some(until) = self.until.get_mut(&association) {
            *until = latest.min(*until);
        }
    }

    /// Executes due commands, and sends completions on connections that are still open.
    fn execute_due(&mut self, ends: &mut [TargetConnection]) {
        let (due, later) = std::mem::take(&mut self.held)
            .into_iter()
            .partition::<Vec<_>, _>(|held| held.at <= self.now);
        self.held = later;
        for mut held in due {
            if !self.may_execute(held.association) {
                continue;
            }
            let completion = self.execute_io(held.association, &held.command, &mut held.bytes);
            if let Some(end) = ends.iter_mut().find(|end| end.number == held.stream) {
                let is_read = held.command.opcode() == IoOpcode::Read.code();
                let moved = if is_read { u32::try_from(held.bytes.len()).unwrap() } else { 0 };
                end.data.0.insert(held.tag, held.bytes);
                end.end.complete(held.tag, moved, completion).unwrap();
            }
        }
    }

    /// Executes an I/O command now.
    fn execute_io(&mut self, whose: u16, command: &Command, bytes: &mut Vec<u8>) -> Completion {
        self.executed += 1;
        let whose = if self.cache.is_some() { 0 } else { whose };
        let lba = usize::try_from(u64::from(command.cdw11()) << 32 | u64::from(command.cdw10()));
        let at = lba.unwrap() * BLOCK;
        let len = ((command.cdw12() & 0xffff) as usize + 1) * BLOCK;
        let mut disk = self.disk.lock().unwrap();
        match IoOpcode::from_u8(command.opcode()) {
            Some(IoOpcode::Read) => *bytes = disk[at..at + len].to_vec(),
            Some(IoOpcode::Write) => {
                disk[at..at + len].copy_from_slice(bytes);
                if command.cdw12() >> 30 & 1 == 1 {
                    let mut durable = self.durable.lock().unwrap();
                    durable[at..at + len].copy_from_slice(bytes);
                } else {
                    let blocks = (at..at + len).step_by(BLOCK);
                    self.unflushed.entry(whose).or_default().extend(blocks);
                }
            }
            Some(IoOpcode::Flush) => {
                self.flushes += 1;
                let mut durable = self.durable.lock().unwrap();
                for at in self.unflushed.remove(&whose).unwrap_or_default() {
                    durable[at..at + BLOCK].copy_from_slice(&disk[at..at + BLOCK]);
                }
            }
            _ => {}
        }
        Completion::new(0, Status::SUCCESS)
    }

    /// Delay of a command: none for most, short for some, and for some beyond the departure of the host.
    fn execution_delay(&mut self) -> Option<Span> {
        if self.delay.is_some() {
            return self.delay;
        }
        let random = self.late.as_mut()?;
        match random.below(10) {
            0..5 => None,
            5..8 => Some(Span::from_us(random.below(2000))),
            _ => Some(Span::from_ms(random.below(4000))),
        }
    }

    /// The ANA log page.
    fn ana_log_page(&self) -> Vec<u8> {
        let last = self.ana_group;
        let count = u16::try_from(last).unwrap();
        let mut page = AnaHeader::zeroed().with(|it| it.ngrps(count)).as_bytes().to_vec();
        for grpid in 1..=last {
            let state = if grpid == last { self.ana } else { AnaState::PersistentLoss };
            ana::append_ana_group(
                AnaGroup::zeroed().with(|it| it.grpid(grpid).state(state)),
                &[],
                &mut page,
            );
        }
        page
    }

    const fn ana_status(&self) -> Option<Status> {
        match self.ana {
            AnaState::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            AnaState::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            AnaState::Change => Some(Status::ANA_TRANSITION),
            _ => None,
        }
    }
}

impl TargetConnection {
    fn step(&mut self, now: Instant, state: &mut TargetState) {
        let mut has_parted = false;
        match self.stream.receive() {
            RecvResult::Bytes(_) | RecvResult::WouldBlock => {}
            RecvResult::Eof => {
                self.is_over = true;
                has_parted = true;
            }
            // The time of the break is unknown.
            RecvResult::Failed(_) => self.is_over = true,
        }
        loop {
            let bytes = self.stream.buffered().to_vec();
            let taken = self.end.receive(now, &bytes, &mut self.events);
            let events = self.events.as_slice().to_vec();
            self.events.clear();
            self.stream.consume(taken);
            for event in &events {
                self.handle_event(event, &bytes, state);
            }
            if taken == 0 && events.is_empty() {
                break;
            }
        }
        if let (true, Some((whose, 0))) = (has_parted, self.queue) {
            state.record_admin_disconnect(whose);
        }
        // Notices: the ANA state or a namespace has changed, see the log page.
        self.complete_event_request(&mut state.ana_has_changed, 0x000c_0302);
        self.complete_event_request(&mut state.namespace_has_changed, 0x0004_0002);
        self.answer_authentication(state);
        self.send(state);
        if self.is_over
            && self.queue.is_some_and(|(whose, queue)| queue == 0 && whose == state.association)
        {
            state.csts = ControllerStatus::zeroed();
            state.cc = Configuration::zeroed();
        }
        // An association ends with its admin queue.
        let is_orphan = self.queue.is_some_and(|(whose, _)| whose != state.association);
        self.is_over |= is_orphan;
    }

    /// Reports an event, if there is one and the host has a pending Asynchronous Event Request.
    fn complete_event_request(&mut self, is_wanted: &mut bool, event: u32) {
        if *is_wanted && let Some(tag) = self.event_tags.pop() {
            *is_wanted = false;
            self.end.complete(tag, 0, Completion::new(0, Status::SUCCESS).with_dw0(event)).unwrap();
        }
    }

    fn send(&mut self, state: &mut TargetState) {
        loop {
            self.end.fill_send_queue(&self.data);
            let mut bytes = Vec::new();
            for piece in self.end.send_pieces() {
                match *piece {
                    SendPiece::Headers { at, len_bytes } => {
                        bytes.extend(&self.end.header_bytes()[at as usize..][..len_bytes as usize]);
                    }
                    SendPiece::Payload { tag, offset, len_bytes } => {
                        bytes.extend(&self.data.0[&tag][offset as usize..][..len_bytes as usize]);
                    }
                }
            }
            let len_bytes = u32::try_from(bytes.len()).unwrap();
            if len_bytes == 0 {
                return;
            }
            let all = [SendSlice::Headers { at: 0, len_bytes }];
            let sent = self.stream.send(&bytes, &all, false);
            self.end.record_sent(*sent.as_ref().unwrap_or(&0), &mut self.events);
            for event in self.events.as_slice().to_vec() {
                self.events.clear();
                self.handle_event(&event, &[], state);
            }
            if !matches!(sent, Ok(count) if count > 0) {
                self.is_over |= sent.is_err();
                return;
            }
        }
    }

    fn handle_event(&mut self, event: &ControllerEvent, bytes: &[u8], state: &mut TargetState) {
        match *event {
            ControllerEvent::Open(_) => {}
            ControllerEvent::Command { tag, command, data } => {
                self.commands.insert(tag, command);
                match data {
                    Ok(DataTransfer::None) => self.execute(tag, 0, state),
                    Ok(DataTransfer::ToHost(len)) => {
                        self.data.0.insert(tag, vec![0; len as usize]);
                        self.execute(tag, len, state);
                    }
                    Ok(DataTransfer::InCapsule(len)) => {
                        self.data.0.insert(tag, vec![0; len as usize]);
                    }
                    Ok(DataTransfer::FromHost(len)) => {
                        self.data.0.insert(tag, vec![0; len as usize]);
                        self.end.request_data(tag, len).unwrap();
                    }
                    Err(status) => self.end.complete(tag, 0, Completion::new(0, status)).unwrap(),
                }
            }
            ControllerEvent::Data { placement, at } => {
                let from = &bytes[at as usize..][..placement.len_bytes as usize];
                let into = self.data.0.get_mut(&placement.tag).unwrap();
                into[placement.offset as usize..][..from.len()].copy_from_slice(from);
            }
            ControllerEvent::DataComplete { tag, .. } => self.execute(tag, 0, state),
            ControllerEvent::Sent { tag } => {
                self.data.0.remove(&tag);
                self.commands.remove(&tag);
            }
            ControllerEvent::Ended(_) => self.is_over = true,
        }
    }
}

/// Bytes that depend on their position.
pub(super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(31) ^ (at >> 9) ^ seed).to_le_bytes()[0]).collect()
}

/// Reads memory of a host.
pub(super) fn load_host_memory(regions: &RegionTable, segment: tenmil_base::Segment) -> Vec<u8> {
    let mut bytes = vec![0; segment.len_bytes as usize];
    regions.load(segment, &mut bytes).unwrap();
    bytes
}
