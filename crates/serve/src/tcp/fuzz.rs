//! Fuzzer of the whole service: hosts of several tenants that send arbitrary commands, in simulated
//! time.
//!
//! The input is a script. Each step names a peer and its action: connect, send a command of any
//! kind with any FUSE value, send requested data completely, partly or wrongly, abort, stop
//! reading, close; or time passes, or a device stops completing. One additional host follows all
//! rules. Invariants:
//!
//! - Free memory stays unchanged: nothing is written outside a buffer.
//! - Buffers, device and responses of a tenant contain only zeroes and its own stamp.
//! - No block of memory has two owners.
//! - The well-behaved host is never disconnected, and each of its commands completes in time.
//! - The protocol engine is never given an impossible request.
//! - After all connections have ended, all memory, connections and associations are released.

mod authentication;
mod fuzz_host;
mod invariants;
mod script_steps;
mod simulated_stream;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{BlockDevice, Instant, Span};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{Command, IoOpcode, Status};

use super::{
    AllowedHosts, ControllerModel, DisconnectReason, Port, Service, ServiceLimits,
    SubsystemExportConfig, SubsystemSecurity, TargetConnection, TargetEvent,
};
pub use authentication::{authentication_seed_scripts, fuzz_nvme_tcp_authentication};
use fuzz_host::{FuzzHost, host_nqn, subsystem_nqn};
use invariants::InvariantChecker;
pub use script_steps::seed_scripts;
use simulated_stream::{DelayedDevice, SimulatedStream};

/// Number of tenants. The host of the first one follows all rules.
const TENANTS: u8 = 3;
/// Largest number of peers at a time.
const PEERS_MAX: usize = 7;
const TRANSFER_BYTES_MAX: u32 = 32 << 10;
const BLOCKS: u64 = 256;
/// Largest number of steps in a script.
const STEPS_MAX: usize = 300;
/// Longest time for which a device does not complete anything.
const STUCK_MAX: Span = Span::from_secs(20);
/// Longest time that a host may owe data that others wait for, and the tolerance for its removal.
const DEBT_MAX: Span = Span::from_secs(126);
const LATE_MAX: Span = Span::from_secs(10);
/// Longest time for a command of the well-behaved host.
const ANSWER_MAX: Span = Span::from_secs(70);

/// Service with all its peers.
struct FuzzTarget {
    regions: RegionTable,
    service: Service,
    now: Instant,
    guests: Vec<TargetConnection>,
    peers: Vec<FuzzHost>,
    media: Vec<TenantDevice>,
    watch: InvariantChecker,
    honest: WellBehavedHost,
    accepted: u64,
    /// Time since which an overdue host has blocked others.
    late_since: Option<Instant>,
}

/// Device of a tenant.
struct TenantDevice {
    ram: Arc<RamDevice>,
    is_stuck: Arc<AtomicBool>,
    stuck_until: Instant,
}

/// Well-behaved host: an admin queue and an I/O queue.
struct WellBehavedHost {
    admin: FuzzHost,
    io: FuzzHost,
    /// Outstanding command and its start time.
    waits: Option<(u16, Instant)>,
    count: u32,
}

/// Executes a script against a service.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn fuzz_nvme_tcp_target(bytes: &[u8]) {
    let mut world = FuzzTarget::new();
    world.run_script(bytes);
    world.close_and_check_released();
}

impl FuzzTarget {
    fn new() -> Self {
        let regions = RegionTable::new(16);
        // Little memory and short queues, so that short scripts reach the wait queue of the buffer
        // pool and the limits of a queue.
        let limits = ServiceLimits {
            memory_bytes: 220 << 10,
            connections_max: 2 + PEERS_MAX,
            queue_entries: 9,
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            io_queues_max: 4,
            ..ServiceLimits::default()
        };
        let service = Service::new(&regions, limits).expect("the limits make sense");
        service.add_port(1, Port { address: None, ..Port::default() });
        let media =
            (0..TENANTS).map(|tenant| export_subsystem(&regions, &service, tenant)).collect();
        let now = Instant { ns: 1_000_000 };
        let watch = InvariantChecker::new(&service);
        let (mut guests, mut accepted) = (Vec::new(), 0);
        let mut dial = |qid| {
            let pipe = SimulatedStream::new(&regions, 4096, "192.0.2.1:5000".to_owned());
            let peer = FuzzHost::new(0, qid, &pipe);
            let guest = service.accept_stream(Box::new(pipe), 1, now);
            guests.push(guest.expect("there is a place"));
            accepted += 1;
            peer
        };
        let (admin, io) = (dial(0), dial(1));
        let honest = WellBehavedHost { admin, io, waits: None, count: 0 };
        let peers = Vec::new();
        let late_since = None;
        let mut world = Self {
            regions,
            service,
            now,
            guests,
            peers,
            media,
            watch,
            honest,
            accepted,
            late_since,
        };
        world.connect_well_behaved_host();
        world
    }

    /// Connects the well-behaved host.
    fn connect_well_behaved_host(&mut self) {
        self.honest.admin.send_connect(None, |command| command);
        self.honest.admin.send_controller_enable();
        self.poll_until_idle();
        let cntlid = self.honest.admin.ended.first().map(|completion| completion.dw0());
        let cntlid = cntlid.and_then(|dword| u16::try_from(dword).ok());
        self.honest.io.send_connect(cntlid, |command| command);
        self.poll_until_idle();
        assert!(
            self.guests.iter().any(|guest| guest.host_of_io_queue().is_some()),
            "it may connect"
        );
        self.honest.admin.ended.clear();
    }

    /// Opens a connection for a tenant.
    fn open_connection(&mut self, tenant: u8, qid: u16, piece: usize) {
        let address = format!("198.51.100.{tenant}:{}", self.accepted);
        let pipe = SimulatedStream::new(&self.regions, piece, address);
        let peer = FuzzHost::new(tenant, qid, &pipe);
        if let Ok(guest) = self.service.accept_stream(Box::new(pipe), 1, self.now) {
            self.accepted += 1;
            self.guests.push(guest);
            self.peers.push(peer);
        }
    }

    /// Advances time, one second at a time.
    fn advance_time(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now = self.now.after(Span::from_secs(1));
            for tenant in &mut self.media {
                if self.now >= tenant.stuck_until {
                    tenant.is_stuck.store(false, Ordering::Relaxed);
                }
            }
            self.poll_until_idle();
            self.assert_no_overdue_data();
        }
    }

    /// Checks that no host owes data for too long while others wait for its memory.
    fn assert_no_overdue_data(&mut self) {
        let is_late = |guest: &TargetConnection| {
            let owed = guest.oldest_data_request_time().map(|since| self.now.since(since));
            owed.is_some_and(|owed| owed > DEBT_MAX) && guest.others_need_memory()
        };
        if !self.guests.iter().any(is_late) {
            self.late_since = None;
            return;
        }
        let late = self.now.since(*self.late_since.get_or_insert(self.now));
        assert!(late <= LATE_MAX, "a host that owes data is there, and others wait");
    }

    /// Polls everything until it is idle, at most 40 rounds.
    fn poll_until_idle(&mut self) {
        let mut idle = 0;
        for _ in 0..40 {
            let mut is_busy = false;
            for at in 0..self.guests.len() {
                is_busy |= self.guests[at].poll_once(self.now);
                self.watch.check_buffer_ownership(&self.guests);
            }
            self.guests.retain(|guest| !guest.is_closed());
            self.watch.check_buffer_ownership(&self.guests);
            self.peers.iter_mut().for_each(FuzzHost::receive_pdus);
            self.peers.retain(|peer| !peer.is_closed());
            is_busy |= self.poll_well_behaved_host();
            self.assert_no_internal_errors();
            idle = if is_busy { 0 } else { idle + 1 };
            if idle > 2 {
                return;
            }
        }
    }

    /// Runs the well-behaved host. Returns whether it did anything.
    fn poll_well_behaved_host(&mut self) -> bool {
        let Self { honest, now, .. } = self;
        honest.admin.receive_pdus();
        honest.io.receive_pdus();
        let is_cut = honest.admin.is_closed() || honest.io.is_closed();
        assert!(!is_cut, "a host that keeps to the rules was cut off");
        let mut is_busy = false;
        while let Some(asked) = honest.io.asked.front().copied() {
            honest.io.send_h2c_data(asked.len_bytes, (0, 0, 0));
            is_busy = true;
        }
        for completion in honest.io.ended.drain(..) {
            assert_eq!(completion.status(), Status::SUCCESS, "{completion:?}");
            if honest.waits.is_some_and(|(cid, _)| cid == completion.cid()) {
                honest.waits = None;
            }
        }
        if let Some((cid, since)) = honest.waits {
            let waited = now.since(since);
            assert!(waited <= ANSWER_MAX, "command {cid} has waited for {waited}");
        }
        is_busy
    }

    /// Submits the next command of the well-behaved host, unless one is outstanding.
    fn submit_well_behaved_command(&mut self) {
        let Self { honest, now, .. } = self;
        if honest.waits.is_some() {
            return;
        }
        honest.count += 1;
        let len = [512, 8192, TRANSFER_BYTES_MAX][honest.count as usize / 2 % 3];
        let opcode = if honest.count % 2 == 0 { IoOpcode::Read } else { IoOpcode::Write };
        let command = read_or_write_command(opcode.code(), honest.count % 8, len / 512);
        let cid =
            honest.io.send_command(&command.with_sgl1(Descriptor::transport_data_block(len)), 0);
        honest.waits = Some((cid, *now));
    }

    /// Checks the service's events for internal errors.
    fn assert_no_internal_errors(&self) {
        while let Some(new_events) = self.service.next_event() {
            if let TargetEvent::Disconnected { reason: DisconnectReason::Internal(what), .. } =
                new_events
            {
                panic!("an end was asked for what is not possible: {what}");
            }
        }
    }

    /// Closes all connections and checks that everything is released.
    fn close_and_check_released(&mut self) {
        self.media.iter_mut().for_each(|tenant| tenant.stuck_until = self.now);
        for _ in 0..ANSWER_MAX.ns / 1_000_000_000 {
            self.advance_time(1);
            if self.honest.waits.is_none() {
                break;
            }
        }
        self.submit_well_behaved_command();
        self.peers.drain(..).for_each(|peer| peer.close());
        self.advance_time(3);
        assert!(self.honest.waits.is_none(), "no other connection blocks it any more");
        invariants::check_device_contents(&self.media, &self.regions);
        self.honest.io.close();
        self.honest.admin.close();
        for _ in 0..40 {
            self.now = self.now.after(Span::from_secs(1));
            for at in 0..self.guests.len() {
                self.guests[at].poll_once(self.now);
            }
            self.guests.retain(|guest| !guest.is_closed());
            self.watch.check_buffer_ownership(&self.guests);
            self.assert_no_internal_errors();
            if self.guests.is_empty() {
                break;
            }
        }
        assert!(self.guests.is_empty(), "these stay: {:?}", self.guests);
        let budget = self.service.buffer_pool();
        assert_eq!((self.service.connection_count(), self.service.association_count()), (0, 0));
        assert_eq!(
            (budget.free_bytes(), budget.waiting_connections()),
            (budget.size_bytes(), 0),
            "memory is back"
        );
    }
}

/// Exports a tenant's subsystem to its host.
fn export_subsystem(regions: &RegionTable, service: &Service, tenant: u8) -> TenantDevice {
    let ram = Arc::new(RamDevice::new(regions, 512, BLOCKS).expect("there is memory"));
    let is_stuck = Arc::new(AtomicBool::new(false));
    let medium = DelayedDevice { ram: Arc::clone(&ram), is_stuck: Arc::clone(&is_stuck) };
    let medium: Arc<dyn BlockDevice> = Arc::new(medium);
    let config = SubsystemConfig {
        nqn: subsystem_nqn(tenant),
        ..SubsystemConfig::new("FUZZ", vec![NamespaceConfig::new(medium)])
    };
    let config = SubsystemExportConfig {
        subsystem: Subsystem::new(config).expect("it can be served"),
        nqn: subsystem_nqn(tenant),
        hosts: AllowedHosts::Listed(BTreeSet::from([host_nqn(tenant)])),
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
        security: SubsystemSecurity::default(),
    };
    service.add_subsystem(config).expect("it has a name of its own");
    TenantDevice { ram, is_stuck, stuck_until: Instant::default() }
}

/// Builds a command for a number of blocks.
fn read_or_write_command(opcode: u8, lba: u32, blocks: u32) -> Command {
    let count = blocks.saturating_sub(1);
    Command::new(opcode).with_nsid(1).with_cdw10(lba).with_cdw12(count)
}
