//! Member of a group as a state machine.
//!
//! ```text
//!   AwaitingLease ─▶ AwaitingName, AwaitingConfiguration ─▶ AwaitingEntry ─▶ Joined ──▶ Leaving ─▶ Left
//!        ▲                                              │ lease lost
//!        └──────────── every group is closed ◀── AwaitingClose
//!
//!   of a group:   Idle ─ claim ─▶ Fencing ─▶ Opening ─▶ Opened ─ record ─▶ Active
//!                  ▲                                                        │ lost, moves, ends
//!                  └─────── release ◀── Closed ◀── Closing ◀────────────────┘
//! ```
//!
//! Decisions depend on the last snapshot of the map and on nothing that was expected of a transaction: a
//! transaction whose reply is lost was executed or not, and the next snapshot shows which.

mod configuration;
mod evaluate;
mod status;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tenmil_base::{Instant, Random, Span};

use super::lease::LeaseTiming;
use super::records::{MemberRecord, Owner};
use super::store::{LeaseId, Snapshot, StoreOperation, StoreReply};

pub use configuration::ProposalOutcome;
use configuration::SharedConfiguration;
pub use status::MemberStatus;

/// Member of a group.
#[derive(Debug)]
pub struct Member {
    config: MemberConfig,
    random: Random,
    /// Seed of the start.
    start_number: u64,
    incarnation: u64,
    state: MemberState,
    lease: Option<LeaseId>,
    /// Lease that was lost, and is not revoked until every device is closed.
    lost_lease: Option<LeaseId>,
    /// Lease that is being revoked, and when that is tried next.
    revoked_lease: Option<(LeaseId, Instant)>,
    /// When the lease ends by this member's clock; the past if there is none.
    serving_until: Instant,
    /// When the next renewal is sent.
    renew_at: Instant,
    /// Number of renewals without a reply.
    renewals_in_flight: u32,
    slot: u16,
    /// Slots that this process has had.
    own_slots: BTreeSet<u16>,
    is_draining: bool,
    is_leaving: bool,
    /// When hosts have had the time to connect; [`Instant::NEVER`] before the member has joined.
    settles_at: Instant,
    is_settled: bool,
    /// Groups whose devices could not be opened, and until when they are not tried again.
    refused: BTreeMap<u32, Instant>,
    phases: BTreeMap<u32, GroupPhase>,
    snapshot: Snapshot,
    /// When the read of the snapshot was sent.
    snapshot_sent: Option<Instant>,
    /// Whether the map may have changed since the last read was sent.
    is_stale: bool,
    read_at: Instant,
    /// The read or transaction in flight: there is one at a time.
    pending: Option<OperationId>,
    in_flight: BTreeMap<OperationId, (Instant, StoreOperation)>,
    next_id: u64,
    /// Operations on leases, which must not wait for those on the map.
    lease_operations: VecDeque<(OperationId, StoreOperation)>,
    map_operations: VecDeque<(OperationId, StoreOperation)>,
    actions: VecDeque<Action>,
    shared: SharedConfiguration,
    /// Cause of the last operation without a reply, until one has a reply.
    store_trouble: Option<String>,
}

/// Configuration of a member.
#[derive(Clone, Debug)]
pub struct MemberConfig {
    /// Name: one process of the group at a time has it.
    pub name: String,
    /// Addresses at which hosts connect.
    pub addresses: Vec<String>,
    /// ANA groups of the group of gateways.
    pub groups: BTreeSet<u32>,
    /// Configuration that all members share, as a text that is equal if the configurations are.
    pub configuration: String,
    /// Times of the lease.
    pub timing: LeaseTiming,
    /// Bug that the simulation must find.
    #[doc(hidden)]
    pub injected_bug: Option<InjectedBug>,
}

/// Bug that the simulation must find.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// The lease is counted from the reply, without margin and drift.
    LeaseWithoutMargin,
    /// Devices are opened and served before the media are fenced from the owner before.
    FenceAfterTakeover,
    /// Groups stay active when the lease is lost.
    StaleAna,
    /// A lost lease is revoked while writes may be under way.
    EarlyRevoke,
    /// A group is claimed although its owner still holds its lease.
    ClaimWithoutExpiry,
}

/// Number of an operation, with which its reply is returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OperationId(u64);

/// State of the membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// The store has not granted a lease yet.
    AwaitingLease,
    /// Another process has the name, or one that has ended has it until its lease ends.
    AwaitingName,
    /// The configuration differs from that of the group.
    AwaitingConfiguration,
    /// The entry of the member is being written.
    AwaitingEntry,
    /// The member holds its lease.
    Joined,
    /// The lease was lost; devices are being closed.
    AwaitingClose,
    /// Groups are being released.
    Leaving,
    /// The member has left the group.
    Left,
}

impl MemberState {
    /// Its name in messages and in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AwaitingLease => "awaiting a lease",
            Self::AwaitingName => "awaiting the end of another lease of this name",
            Self::AwaitingConfiguration => "awaiting the configuration of the group",
            Self::AwaitingEntry => "joining",
            Self::Joined => "member",
            Self::AwaitingClose => "lease lost, closing devices",
            Self::Leaving => "leaving",
            Self::Left => "left",
        }
    }
}

/// Phase of an ANA group at this member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GroupPhase {
    /// Another member owns it, or none does.
    #[default]
    Idle,
    /// The media are being fenced from earlier owners.
    Fencing,
    /// The devices are being opened.
    Opening,
    /// The devices are open, and what is known of them is not recorded yet.
    Opened(OpenedGroup),
    /// Hosts may use it here.
    Active,
    /// Outstanding commands are completed, and the devices closed.
    Closing,
    /// The devices are closed, and the group is not released yet.
    Closed,
}

/// What is recorded of a group whose devices were opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenedGroup {
    /// Names of this member at the media, which the next owner fences.
    pub names: Vec<String>,
    /// Keys and values of [`NamespaceRecord`](super::records::NamespaceRecord)s.
    pub records: BTreeMap<String, String>,
}

/// What the owner of the devices does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Fences the media from earlier owners of a group, by their names there, and calls
    /// [`Member::handle_fenced`].
    Fence {
        /// ANA group.
        group: u32,
        /// Names of the earlier owners.
        names: Vec<String>,
    },
    /// Opens the devices of a group, and calls [`Member::handle_opened`].
    Open {
        /// ANA group.
        group: u32,
    },
    /// Applies the configuration of the group, which another member has changed, and calls
    /// [`Member::handle_configured`].
    Configure {
        /// Configuration that all members share.
        configuration: String,
    },
    /// Makes a group optimized.
    Activate {
        /// ANA group.
        group: u32,
    },
    /// Makes a group inaccessible, waits for its commands, closes its devices, and calls
    /// [`Member::handle_closed`]. Also when the devices could not be opened.
    Close {
        /// ANA group.
        group: u32,
    },
}

/// Interval of reads without a notification of a change.
const READ_INTERVAL: Span = Span::from_secs(1);
/// Time after an operation without a reply, or a conflict, until the next attempt.
const RETRY: Span = Span::from_ms(100);
/// Time in which hosts connect to a member that has joined: the usual reconnect interval of Linux is 10 s.
const SETTLE: Span = Span::from_secs(15);
/// Time for which a group is not tried again that could not be opened.
const REFUSE: Span = Span::from_secs(10);
/// Largest number of renewals without a reply.
const RENEWALS_MAX: u32 = 4;

impl Member {
    /// A member that joins. `seed` is different for each start of a process.
    #[must_use]
    pub fn new(config: MemberConfig, seed: u64) -> Self {
        let phases = config.groups.iter().map(|group| (*group, GroupPhase::Idle)).collect();
        let mut random = Random::new(seed);
        let configuration = config.configuration.clone();
        Self {
            incarnation: random.next_u64(),
            config,
            random,
            start_number: seed,
            state: MemberState::AwaitingLease,
            lease: None,
            lost_lease: None,
            revoked_lease: None,
            serving_until: Instant::default(),
            renew_at: Instant::default(),
            renewals_in_flight: 0,
            slot: 0,
            own_slots: BTreeSet::new(),
            is_draining: false,
            is_leaving: false,
            settles_at: Instant::NEVER,
            is_settled: false,
            refused: BTreeMap::new(),
            phases,
            snapshot: Snapshot::default(),
            snapshot_sent: None,
            is_stale: true,
            read_at: Instant::default(),
            pending: None,
            in_flight: BTreeMap::new(),
            next_id: 0,
            lease_operations: VecDeque::new(),
            map_operations: VecDeque::new(),
            actions: VecDeque::new(),
            shared: SharedConfiguration::new(configuration),
            store_trouble: None,
        }
    }

    /// Instant from which on no command may be executed and no result sent for a group of this member.
    #[must_use]
    pub const fn serving_until(&self) -> Instant {
        self.serving_until
    }

    /// Does what is due. Called after every input, and at [`next_step_at`](Self::next_step_at).
    pub fn step(&mut self, now: Instant) {
        let holds_lease = matches!(
            self.state,
            MemberState::AwaitingName
                | MemberState::AwaitingConfiguration
                | MemberState::AwaitingEntry
                | MemberState::Joined
                | MemberState::Leaving
        );
        if holds_lease && now >= self.serving_until {
            self.lose_lease();
        }
        match self.state {
            MemberState::AwaitingLease => self.request_lease(now),
            MemberState::AwaitingClose => self.rejoin_when_closed(),
            _ => {}
        }
        if let Some((lease, at)) = self.revoked_lease
            && now >= at
        {
            self.revoked_lease = Some((lease, Instant::NEVER));
            let _ = self.send(now, StoreOperation::Revoke(lease));
        }
        if self.state == MemberState::Left {
            return;
        }
        if !self.is_settled && now >= self.settles_at {
            self.is_settled = true;
            self.handle_change(now);
        }
        self.refused.retain(|_, until| *until > now);
        if let Some(lease) = self.lease
            && now >= self.renew_at
            && self.renewals_in_flight < RENEWALS_MAX
        {
            self.renew_at = now.after(self.config.timing.renewal_interval());
            self.renewals_in_flight += 1;
            let _ = self.send(now, StoreOperation::Renew(lease));
        }
        let reads = !matches!(self.state, MemberState::AwaitingLease | MemberState::AwaitingClose);
        if reads && self.pending.is_none() && now >= self.read_at {
            self.is_stale = false;
            self.read_at = now.after(READ_INTERVAL);
            self.pending = Some(self.send(now, StoreOperation::Read));
        }
    }

    /// Instant of the next [`step`](Self::step).
    #[must_use]
    pub fn next_step_at(&self) -> Instant {
        let read = if self.pending.is_none() { self.read_at } else { Instant::NEVER };
        let revocation = self.revoked_lease.map_or(Instant::NEVER, |(_, at)| at);
        let next = match (self.state, self.lease) {
            (MemberState::AwaitingLease, _) => self.renew_at,
            (MemberState::AwaitingClose | MemberState::Left, _) => Instant::NEVER,
            (_, Some(_)) => self.renew_at.min(read).min(self.serving_until),
            (_, None) => read,
        };
        next.min(revocation)
    }

    /// Handles the reply to an operation. Every operation has one.
    pub fn handle_reply(&mut self, now: Instant, id: OperationId, reply: StoreReply) {
        let Some((sent, operation)) = self.in_flight.remove(&id) else { return };
        match &reply {
            StoreReply::Unknown(cause) => self.store_trouble = Some(cause.clone()),
            _ => self.store_trouble = None,
        }
        if self.pending == Some(id) {
            self.pending = None;
            self.read_at = now;
        }
        match operation {
            StoreOperation::Grant { .. } => self.handle_grant(now, sent, reply),
            StoreOperation::Renew(lease) => self.handle_renewal(now, sent, lease, &reply),
            StoreOperation::Revoke(lease) => self.handle_revocation(now, lease, &reply),
            StoreOperation::Read => match reply {
                StoreReply::Snapshot(snapshot) => {
                    self.snapshot = snapshot;
                    self.snapshot_sent = Some(sent);
                    // A change since the read was sent is read at once.
                    self.read_at = if self.is_stale { now } else { now.after(READ_INTERVAL) };
                    self.evaluate(now);
                }
                _ => self.read_at = now.after(RETRY),
            },
            StoreOperation::Commit(_) => match reply {
                StoreReply::Committed => {}
                StoreReply::LeaseEnded => self.lose_lease(),
                _ => self.read_at = now.after(RETRY),
            },
        }
        self.step(now);
    }

    /// The map has changed, or may have.
    pub fn handle_change(&mut self, now: Instant) {
        self.is_stale = true;
        if self.pending.is_none() {
            self.read_at = self.read_at.min(now);
        }
    }

    /// The media of a group are fenced from earlier owners, or cannot be.
    pub fn handle_fenced(&mut self, now: Instant, group: u32, is_fenced: bool) {
        if self.phase(group) != GroupPhase::Fencing {
            return;
        }
        match is_fenced {
            true if self.state == MemberState::Joined => self.open(group),
            true => self.close(group),
            false => self.refuse(now, group),
        }
    }

    /// The devices of a group are open, or cannot be opened.
    pub fn handle_opened(&mut self, now: Instant, group: u32, opened: Option<OpenedGroup>) {
        if self.phase(group) != GroupPhase::Opening {
            return;
        }
        match opened {
            Some(opened) if self.state == MemberState::Joined => {
                self.set_phase(group, GroupPhase::Opened(opened));
                self.handle_change(now);
            }
            Some(_) => self.close(group),
            None => self.refuse(now, group),
        }
    }

    /// A device of a group is lost to this member, and another one may reach it.
    pub fn handle_lost_device(&mut self, now: Instant, group: u32) {
        if matches!(self.phase(group), GroupPhase::Opened(_) | GroupPhase::Active) {
            self.refuse(now, group);
            self.handle_change(now);
        }
    }

    /// The devices of a group are closed.
    pub fn handle_closed(&mut self, now: Instant, group: u32) {
        if self.phase(group) == GroupPhase::Closing {
            self.set_phase(group, GroupPhase::Closed);
            self.handle_change(now);
            self.step(now);
        }
    }

    /// Has the other members take over the groups of this one.
    pub fn drain(&mut self, now: Instant) {
        self.is_draining = true;
        self.handle_change(now);
    }

    /// Ends [`drain`](Self::drain): this member owns its share of the groups again, also if it has just joined.
    pub fn rebalance(&mut self, now: Instant) {
        self.is_draining = false;
        self.is_settled = true;
        self.refused.clear();
        self.handle_change(now);
    }

    /// Releases all groups and leaves the group.
    pub fn leave(&mut self, now: Instant) {
        self.is_leaving = true;
        match self.state {
            MemberState::Joined => {
                self.state = MemberState::Leaving;
                self.handle_change(now);
            }
            MemberState::AwaitingLease => self.state = MemberState::Left,
            MemberState::AwaitingName
            | MemberState::AwaitingConfiguration
            | MemberState::AwaitingEntry => self.lose_lease(),
            MemberState::AwaitingClose | MemberState::Leaving | MemberState::Left => {}
        }
        self.step(now);
    }

    /// Number that distinguishes this start from others of the same name.
    pub(crate) const fn start_number(&self) -> u64 {
        self.start_number
    }

    /// Next operation on a lease. It must not wait for those on the map.
    pub fn next_lease_operation(&mut self) -> Option<(OperationId, StoreOperation)> {
        self.lease_operations.pop_front()
    }

    /// Next operation on the map. There is one at a time.
    pub fn next_map_operation(&mut self) -> Option<(OperationId, StoreOperation)> {
        self.map_operations.pop_front()
    }

    /// Next action.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    fn request_lease(&mut self, now: Instant) {
        let is_requested =
            self.in_flight.values().any(|(_, it)| matches!(it, StoreOperation::Grant { .. }));
        if is_requested || now < self.renew_at {
            return;
        }
        self.renew_at = now.after(RETRY);
        let time_to_live = self.config.timing.lease;
        let _ = self.send(now, StoreOperation::Grant { time_to_live });
    }

    fn handle_grant(&mut self, now: Instant, sent: Instant, reply: StoreReply) {
        let StoreReply::Granted(lease) = reply else {
            self.renew_at = now.after(RETRY);
            return;
        };
        if self.state != MemberState::AwaitingLease {
            return;
        }
        self.lease = Some(lease);
        self.extend_lease(now, sent);
        self.renew_at = now.after(self.config.timing.renewal_interval());
        self.state = MemberState::AwaitingName;
        self.read_at = now;
    }

    fn handle_renewal(&mut self, now: Instant, sent: Instant, lease: LeaseId, reply: &StoreReply) {
        if self.lease != Some(lease) {
            return;
        }
        self.renewals_in_flight = self.renewals_in_flight.saturating_sub(1);
        match reply {
            // A reply after the member has stopped does not start it again: it has lost the lease.
            StoreReply::Done if now < self.serving_until => self.extend_lease(now, sent),
            StoreReply::LeaseEnded => self.lose_lease(),
            _ => {}
        }
    }

    fn extend_lease(&mut self, now: Instant, sent: Instant) {
        let until = match self.config.injected_bug {
            Some(InjectedBug::LeaseWithoutMargin) => now.after(self.config.timing.lease),
            _ => self.config.timing.serving_until(sent),
        };
        self.serving_until = self.serving_until.max(until);
    }

    /// Stops serving: every group is closed, and then the member joins again.
    fn lose_lease(&mut self) {
        if self.config.injected_bug == Some(InjectedBug::StaleAna) {
            self.serving_until = Instant::NEVER;
            return;
        }
        let Some(lease) = self.lease.take() else { return };
        self.shared.abandon_proposal();
        self.lost_lease = Some(lease);
        if self.config.injected_bug == Some(InjectedBug::EarlyRevoke) {
            self.revoke_lost_lease();
        }
        self.serving_until = Instant::default();
        self.renewals_in_flight = 0;
        (self.settles_at, self.is_settled) = (Instant::NEVER, false);
        self.state = MemberState::AwaitingClose;
        // What is being fenced or opened is closed after that.
        let is_open =
            |phase: &GroupPhase| matches!(phase, GroupPhase::Opened(_) | GroupPhase::Active);
        let open: Vec<u32> =
            self.phases.iter().filter(|(_, it)| is_open(it)).map(|(group, _)| *group).collect();
        open.into_iter().for_each(|group| self.close(group));
    }

    fn rejoin_when_closed(&mut self) {
        let is_closed = |phase: &GroupPhase| matches!(phase, GroupPhase::Idle | GroupPhase::Closed);
        if !self.phases.values().all(is_closed) || self.pending.is_some() {
            return;
        }
        // Others need not wait for its end; before, writes of this member may have been under way.
        self.revoke_lost_lease();
        // The records of these groups name the former incarnation.
        self.phases.values_mut().for_each(|phase| *phase = GroupPhase::Idle);
        self.incarnation = self.random.next_u64();
        self.renew_at = Instant::default();
        self.state = if self.is_leaving { MemberState::Left } else { MemberState::AwaitingLease };
    }

    /// Ends the lease in the store. Until that has succeeded, the name of this member is in use.
    fn revoke_lost_lease(&mut self) {
        if let Some(lease) = self.lost_lease.take() {
            self.revoked_lease = Some((lease, Instant::default()));
        }
    }

    fn handle_revocation(&mut self, now: Instant, lease: LeaseId, reply: &StoreReply) {
        let is_it = self.revoked_lease.is_some_and(|(revoked, _)| revoked == lease);
        match reply {
            _ if !is_it => {}
            StoreReply::Unknown(_) => self.revoked_lease = Some((lease, now.after(RETRY))),
            _ => self.revoked_lease = None,
        }
    }

    fn open(&mut self, group: u32) {
        self.set_phase(group, GroupPhase::Opening);
        self.actions.push_back(Action::Open { group });
    }

    fn close(&mut self, group: u32) {
        self.set_phase(group, GroupPhase::Closing);
        self.actions.push_back(Action::Close { group });
    }

    fn refuse(&mut self, now: Instant, group: u32) {
        self.refused.insert(group, now.after(REFUSE));
        self.close(group);
    }

    fn phase(&self, group: u32) -> GroupPhase {
        self.phases.get(&group).cloned().unwrap_or_default()
    }

    fn set_phase(&mut self, group: u32, phase: GroupPhase) {
        self.phases.insert(group, phase);
    }

    fn identity(&self) -> Owner {
        Owner { name: self.config.name.clone(), incarnation: self.incarnation }
    }

    fn record(&self) -> MemberRecord {
        MemberRecord {
            incarnation: self.incarnation,
            slot: self.slot,
            addresses: self.config.addresses.clone(),
            is_draining: self.is_draining || self.is_leaving,
            is_settled: self.is_settled,
            refused: self.refused.keys().copied().collect(),
        }
    }

    fn send(&mut self, now: Instant, operation: StoreOperation) -> OperationId {
        let id = self.next_operation_id();
        self.in_flight.insert(id, (now, operation.clone()));
        match operation {
            StoreOperation::Read | StoreOperation::Commit(_) => {
                self.map_operations.push_back((id, operation));
            }
            _ => self.lease_operations.push_back((id, operation)),
        }
        id
    }

    fn next_operation_id(&mut self) -> OperationId {
        self.next_id += 1;
        OperationId(self.next_id)
    }
}
