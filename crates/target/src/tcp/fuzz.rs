//! Hosts of several tenants that send anything, over the whole service, in simulated time.
//!
//! The bytes are a script. Each step names a peer and what it does: connects, sends a command of any
//! kind with any FUSE, answers what it was asked for in whole, in part or wrongly, aborts, takes
//! nothing, closes; or time passes, or a medium stops to answer. Beside them is a host that keeps to
//! all rules. What has to hold:
//!
//! - Memory that no connection has is as it was left: nothing is written behind a buffer.
//! - A tenant's buffers, medium and answers hold zeroes and its own stamp, and nobody else's.
//! - No block of memory is had twice.
//! - The host that keeps to the rules is never cut off, and each of its commands ends in time.
//! - No end of a connection is asked for what is not possible.
//! - When all have gone, all memory, connections and associations are back.

mod peer;
mod steps;
mod stream;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Instant, Medium, Span};
use block::Ram;
use ctrl::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use dma::Regions;
use wire::sgl::Descriptor;
use wire::{Command, IoOpcode, Status};

use super::{ControllerModel, Guest, Hosts, Limits, News, OfferPlan, Port, Reason, Service};
use peer::{Peer, host, subsystem};
pub use steps::seeds;
use stream::{Late, Pipe};
use watch::Watch;

/// Tenants. The first one's host keeps to all rules.
const TENANTS: u8 = 3;
/// Peers of a script at a time.
const PEERS_MAX: usize = 7;
const TRANSFER_BYTES_MAX: u32 = 32 << 10;
const BLOCKS: u64 = 256;
/// Steps of the longest script.
const STEPS_MAX: usize = 300;
/// How long a medium is stuck at most.
const STUCK_MAX: Span = Span::from_secs(20);
/// How long a host may owe data that others wait for, and how long it may be there nevertheless.
const DEBT_MAX: Span = Span::from_secs(126);
const LATE_MAX: Span = Span::from_secs(10);
/// How long a command of the host that keeps to all rules may take.
const ANSWER_MAX: Span = Span::from_secs(70);

/// A service, and all who are connected.
struct World {
    regions: Regions,
    service: Service,
    now: Instant,
    guests: Vec<Guest>,
    peers: Vec<Peer>,
    media: Vec<Tenant>,
    watch: Watch,
    honest: Honest,
    accepted: u64,
    /// Since when somebody has owed for too long what others wait for.
    late_since: Option<Instant>,
}

/// What a tenant has.
struct Tenant {
    ram: Arc<Ram>,
    is_stuck: Arc<AtomicBool>,
    stuck_until: Instant,
}

/// The host that keeps to all rules: an admin connection and one for I/O.
struct Honest {
    admin: Peer,
    io: Peer,
    /// A command of it, and since when it has waited.
    waits: Option<(u16, Instant)>,
    count: u32,
}

/// Gives a script to a service as what its hosts do.
///
/// # Panics
///
/// If something does not hold that must: a mistake in this crate, never in the bytes.
pub fn fuzz(bytes: &[u8]) {
    let mut world = World::new();
    world.play(bytes);
    world.end();
}

impl World {
    fn new() -> Self {
        let regions = Regions::new(16);
        let limits = Limits {
            memory_bytes: 256 << 10,
            connections_max: 2 + PEERS_MAX,
            queue_entries: 9,
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            io_queues_max: 4,
            ..Limits::default()
        };
        let service = Service::new(&regions, limits).expect("the limits make sense");
        service.open_port(1, Port { address: None });
        let media = (0..TENANTS).map(|tenant| offer(&regions, &service, tenant)).collect();
        let now = Instant { ns: 1_000_000 };
        let watch = Watch::new(&service);
        let (mut guests, mut accepted) = (Vec::new(), 0);
        let mut dial = |qid| {
            let pipe = Pipe::new(&regions, 4096, "192.0.2.1:5000".to_owned());
            let peer = Peer::new(0, qid, &pipe);
            let guest = service.accept(Box::new(pipe), 1, now);
            guests.push(guest.expect("there is a place"));
            accepted += 1;
            peer
        };
        let (admin, io) = (dial(0), dial(1));
        let honest = Honest { admin, io, waits: None, count: 0 };
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
        world.welcome();
        world
    }

    /// The host that keeps to the rules connects.
    fn welcome(&mut self) {
        self.honest.admin.connect(None, |command| command);
        self.honest.admin.enable();
        self.turn();
        let cntlid = self.honest.admin.ended.first().map(|completion| completion.dw0());
        let cntlid = cntlid.and_then(|dword| u16::try_from(dword).ok());
        self.honest.io.connect(cntlid, |command| command);
        self.turn();
        assert!(self.guests.iter().any(|guest| guest.io_host().is_some()), "it may connect");
        self.honest.admin.ended.clear();
    }

    /// A new connection of a tenant.
    fn dial(&mut self, tenant: u8, qid: u16, piece: usize) {
        let address = format!("198.51.100.{tenant}:{}", self.accepted);
        let pipe = Pipe::new(&self.regions, piece, address);
        let peer = Peer::new(tenant, qid, &pipe);
        if let Ok(guest) = self.service.accept(Box::new(pipe), 1, self.now) {
            self.accepted += 1;
            self.guests.push(guest);
            self.peers.push(peer);
        }
    }

    /// Time passes, a second at a time.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now = self.now.after(Span::from_secs(1));
            for tenant in &mut self.media {
                if self.now >= tenant.stuck_until {
                    tenant.is_stuck.store(false, Ordering::Relaxed);
                }
            }
            self.turn();
            self.look_at_debts();
        }
    }

    /// While others wait for its memory no host owes data for longer than there is time for.
    fn look_at_debts(&mut self) {
        let is_late = |guest: &Guest| {
            let owed = guest.owed_since().map(|since| self.now.since(since));
            owed.is_some_and(|owed| owed > DEBT_MAX) && guest.is_missed()
        };
        if !self.guests.iter().any(is_late) {
            self.late_since = None;
            return;
        }
        let late = self.now.since(*self.late_since.get_or_insert(self.now));
        assert!(late <= LATE_MAX, "a host that owes data is there, and others wait");
    }

    /// Turns everybody until nobody has anything to do, or for a while.
    fn turn(&mut self) {
        let mut idle = 0;
        for _ in 0..40 {
            let mut is_busy = false;
            for at in 0..self.guests.len() {
                is_busy |= self.guests[at].turn(self.now);
                self.watch.look(&self.guests);
            }
            self.guests.retain(|guest| !guest.is_over());
            self.watch.look(&self.guests);
            self.peers.iter_mut().for_each(Peer::read);
            self.peers.retain(|peer| !peer.is_over());
            is_busy |= self.behave();
            self.hear();
            idle = if is_busy { 0 } else { idle + 1 };
            if idle > 2 {
                return;
            }
        }
    }

    /// What the host does that keeps to all rules. Whether it did something.
    fn behave(&mut self) -> bool {
        let Self { honest, now, .. } = self;
        honest.admin.read();
        honest.io.read();
        let is_cut = honest.admin.is_over() || honest.io.is_over();
        assert!(!is_cut, "a host that keeps to the rules was cut off");
        let mut is_busy = false;
        while let Some(asked) = honest.io.asked.front().copied() {
            honest.io.answer(asked.len_bytes, (0, 0, 0));
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

    /// It has something to do, unless it waits.
    fn work(&mut self) {
        let Self { honest, now, .. } = self;
        if honest.waits.is_some() {
            return;
        }
        honest.count += 1;
        let len = [512, 8192, TRANSFER_BYTES_MAX][honest.count as usize / 2 % 3];
        let opcode = if honest.count % 2 == 0 { IoOpcode::Read } else { IoOpcode::Write };
        let command = transfer(opcode.code(), honest.count % 8, len / 512);
        let cid = honest.io.command(&command.with_sgl1(Descriptor::transport(len)), 0);
        honest.waits = Some((cid, *now));
    }

    /// Listens to what the service says.
    fn hear(&self) {
        while let Some(news) = self.service.next_news() {
            if let News::Disconnected { reason: Reason::Internal(what), .. } = news {
                panic!("an end was asked for what is not possible: {what}");
            }
        }
    }

    /// All go, and everything is back.
    fn end(&mut self) {
        self.media.iter_mut().for_each(|tenant| tenant.stuck_until = self.now);
        for _ in 0..ANSWER_MAX.ns / 1_000_000_000 {
            self.pass(1);
            if self.honest.waits.is_none() {
                break;
            }
        }
        self.work();
        self.peers.drain(..).for_each(|peer| peer.close());
        self.pass(3);
        assert!(self.honest.waits.is_none(), "nobody is in its way any more");
        watch::look_at_media(&self.media, &self.regions);
        self.honest.io.close();
        self.honest.admin.close();
        for _ in 0..40 {
            self.now = self.now.after(Span::from_secs(1));
            for at in 0..self.guests.len() {
                self.guests[at].turn(self.now);
            }
            self.guests.retain(|guest| !guest.is_over());
            self.watch.look(&self.guests);
            self.hear();
            if self.guests.is_empty() {
                break;
            }
        }
        assert!(self.guests.is_empty(), "these stay: {:?}", self.guests);
        let budget = self.service.budget();
        assert_eq!((self.service.connected(), self.service.associations()), (0, 0));
        assert_eq!((budget.free_bytes(), budget.waiting()), (budget.bytes(), 0), "memory is back");
    }
}

/// Offers a tenant's subsystem to its host.
fn offer(regions: &Regions, service: &Service, tenant: u8) -> Tenant {
    let ram = Arc::new(Ram::new(regions, 512, BLOCKS).expect("there is memory"));
    let is_stuck = Arc::new(AtomicBool::new(false));
    let medium = Late { ram: Arc::clone(&ram), is_stuck: Arc::clone(&is_stuck) };
    let medium: Arc<dyn Medium> = Arc::new(medium);
    let config = SubsystemConfig {
        nqn: subsystem(tenant),
        ..SubsystemConfig::new("FUZZ", vec![NamespaceConfig::new(medium)])
    };
    let plan = OfferPlan {
        subsystem: Subsystem::new(config).expect("it can be served"),
        nqn: subsystem(tenant),
        hosts: Hosts::Listed(BTreeSet::from([host(tenant)])),
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
    };
    service.offer(plan).expect("it has a name of its own");
    Tenant { ram, is_stuck, stuck_until: Instant::default() }
}

/// A command on so many blocks.
fn transfer(opcode: u8, lba: u32, blocks: u32) -> Command {
    let count = blocks.saturating_sub(1);
    Command::new(opcode).with_nsid(1).with_cdw10(lba).with_cdw12(count)
}
