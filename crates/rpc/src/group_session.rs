//! Membership of this process in a gateway group: the state machine with the threads that talk to its store.
//!
//! ```text
//!   group-lease: renewals ──┐                   ┌──▶ LeaseEnd, which the I/O path reads
//!   group-map: transactions ┼──▶ Member ────────┼──▶ actions, which the target's main loop executes
//!   group-watch: changes ───┘     (a lock)      └──▶ status, for the control methods
//! ```
//!
//! The renewals have a connection of their own: nothing else delays them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenmil_base::{Error, Instant, Span};
use tenmil_drivers::LeaseEnd;
use tenmil_group::{
    Action, LeaseTiming, Member, MemberConfig, MemberStatus, OpenedGroup, OperationId,
    ProposalOutcome, Snapshot, Store, StoreOperation,
};
use tenmil_linux::{Clock, NamedThread, StopFlag};

use crate::group_store::{OpenedStore, StoreWatch};
use crate::target_config::{GroupConfig, SharedConfig, SubsystemConfig};

/// Membership of this process. Clones are handles to the same one; the threads end with
/// [`GroupThreads`].
#[derive(Clone, Debug)]
pub struct GroupSession {
    shared: Arc<SharedMember>,
}

/// Threads of a membership. Dropping them ends the renewals.
#[derive(Debug)]
pub struct GroupThreads(#[expect(dead_code, reason = "ended by drop")] Vec<NamedThread<()>>);

#[derive(Debug)]
struct SharedMember {
    member: Mutex<Member>,
    /// Signaled after each change of the member.
    changed: Condvar,
    lease_end: LeaseEnd,
    clock: Clock,
}

/// Longest wait of a thread before it checks whether it shall end.
const CHECK_INTERVAL: Span = Span::from_ms(100);
/// Longest wait for a change of the configuration.
const PROPOSAL_LIMIT: Span = Span::from_secs(5);
/// Wait after the connection of a watch was lost.
const WATCH_RETRY: Span = Span::from_ms(300);

impl GroupSession {
    /// Begins to join the group. The member owns nothing before it has a lease.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started.
    pub fn start(
        config: &GroupConfig,
        subsystems: &[SubsystemConfig],
        shared: &SharedConfig,
        lease_end: LeaseEnd,
        clock: Clock,
    ) -> Result<(Self, GroupThreads), Error> {
        let timing = LeaseTiming::of_lease(config.lease);
        let member = MemberConfig {
            name: config.member.clone(),
            addresses: config.addresses.iter().map(ToString::to_string).collect(),
            groups: GroupConfig::ana_groups(subsystems),
            configuration: shared.to_record(),
            timing,
            injected_bug: None,
        };
        let member = Mutex::new(Member::new(member, tenmil_linux::random_seed()));
        let shared = SharedMember { member, changed: Condvar::new(), lease_end, clock };
        let session = Self { shared: Arc::new(shared) };
        // A renewal that takes longer is followed by the next one.
        let time_limit = Span { ns: config.lease.ns / 3 };
        let OpenedStore { leases, map, mut watch } =
            config.store.open(&config.name, clock, time_limit)?;
        let mut threads = Vec::new();
        for (name, mut store, next) in [
            ("group-lease", leases, Member::next_lease_operation as NextOperation),
            ("group-map", map, Member::next_map_operation),
        ] {
            let session = session.clone();
            let execute =
                move |stop: &StopFlag| session.execute_operations(stop, &mut *store, next);
            threads.push(spawn(name, execute)?);
        }
        let watching = session.clone();
        threads.push(spawn("group-watch", move |stop| watching.watch_changes(stop, &mut *watch))?);
        Ok((session, GroupThreads(threads)))
    }

    /// Next action of the target.
    #[must_use]
    pub fn next_action(&self) -> Option<Action> {
        self.change(|member, _| member.next_action())
    }

    /// The media of an ANA group are fenced, or cannot be.
    pub fn handle_fenced(&self, group: u32, is_fenced: bool) {
        self.change(|member, now| member.handle_fenced(now, group, is_fenced));
    }

    /// The devices of an ANA group are open, or cannot be opened.
    pub fn handle_opened(&self, group: u32, opened: Option<OpenedGroup>) {
        self.change(|member, now| member.handle_opened(now, group, opened));
    }

    /// A device of an ANA group is lost to this process.
    pub fn handle_lost_device(&self, group: u32) {
        self.change(|member, now| member.handle_lost_device(now, group));
    }

    /// The devices of an ANA group are closed.
    pub fn handle_closed(&self, group: u32) {
        self.change(|member, now| member.handle_closed(now, group));
    }

    /// Has others take over the ANA groups of this member, or ends that.
    pub fn set_draining(&self, is_draining: bool) {
        self.change(|member, now| match is_draining {
            true => member.drain(now),
            false => member.rebalance(now),
        });
    }

    /// Changes the configuration of the group if that is still the one of this gateway. Waits for the store.
    ///
    /// # Errors
    ///
    /// If another gateway has changed it meanwhile, or the store does not answer.
    pub fn change_configuration(&self, shared: &SharedConfig) -> Result<(), Error> {
        self.change(|member, now| member.propose_configuration(now, shared.to_record()));
        let end = self.shared.clock.now().after(PROPOSAL_LIMIT);
        let mut member = self.lock();
        loop {
            if let Some(outcome) = member.take_proposal_outcome() {
                return proposal_result(outcome);
            }
            let left = end.since(self.shared.clock.now());
            if left.ns == 0 {
                member.cancel_proposal();
                let text =
                    format!("the store of the group has not answered within {PROPOSAL_LIMIT}");
                let hint = "repeat the change: it may have been made";
                return Err(Error::remote(text).with_hint(hint));
            }
            let waited = self.shared.changed.wait_timeout(member, Duration::from_nanos(left.ns));
            member = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A configuration of the group is applied, or cannot be.
    pub fn handle_configured(&self, configuration: String, is_applied: bool) {
        self.change(|member, now| member.handle_configured(now, configuration, is_applied));
    }

    /// Configuration of the group, if it differs from that with which this process was started.
    #[must_use]
    pub fn differing_configuration(&self) -> Option<SharedConfig> {
        SharedConfig::of_record(self.lock().differing_configuration()?)
    }

    /// Releases all ANA groups, and leaves the group.
    pub fn leave(&self) {
        self.change(|member, now| member.leave(now));
    }

    /// What is known of the group.
    #[must_use]
    pub fn status(&self) -> MemberStatus {
        self.lock().status()
    }

    /// The last snapshot of the map.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.lock().snapshot().clone()
    }

    /// Whether the controllers of a slot can execute no command any more.
    #[must_use]
    pub fn has_slot_ended(&self, now: Instant, slot: u16) -> bool {
        self.lock().has_slot_ended(now, slot)
    }

    fn change<R>(&self, change: impl FnOnce(&mut Member, Instant) -> R) -> R {
        let mut member = self.lock();
        let now = self.shared.clock.now();
        let result = change(&mut member, now);
        member.step(now);
        self.publish(&member);
        result
    }

    fn publish(&self, member: &Member) {
        self.shared.lease_end.set(member.serving_until());
        self.shared.changed.notify_all();
    }

    /// Executes the operations of one kind, one after the other.
    fn execute_operations(&self, stop: &StopFlag, store: &mut dyn Store, next: NextOperation) {
        while !stop.is_stopped() {
            let Some((id, operation)) = self.wait_for_operation(next) else { continue };
            let reply = store.execute(&operation);
            self.change(|member, now| member.handle_reply(now, id, reply));
        }
    }

    /// The next operation, or none after a while.
    fn wait_for_operation(&self, next: NextOperation) -> Option<(OperationId, StoreOperation)> {
        let mut member = self.lock();
        let now = self.shared.clock.now();
        let before = member.serving_until();
        member.step(now);
        if member.serving_until() != before {
            self.publish(&member);
        }
        if let Some(operation) = next(&mut member) {
            return Some(operation);
        }
        let wait = member.next_step_at().since(now).ns.clamp(1_000_000, CHECK_INTERVAL.ns);
        let waited = self.shared.changed.wait_timeout(member, Duration::from_nanos(wait));
        let mut member = waited.unwrap_or_else(PoisonError::into_inner).0;
        next(&mut member)
    }

    fn watch_changes(&self, stop: &StopFlag, watch: &mut dyn StoreWatch) {
        while !stop.is_stopped() {
            match watch.wait(CHECK_INTERVAL) {
                Ok(true) => self.change(Member::handle_change),
                Ok(false) => {}
                Err(_) => tenmil_linux::named_thread::sleep(WATCH_RETRY),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Member> {
        self.shared.member.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn proposal_result(outcome: ProposalOutcome) -> Result<(), Error> {
    match outcome {
        ProposalOutcome::Adopted => Ok(()),
        ProposalOutcome::Conflict => {
            let text = "another gateway has changed the configuration of the group meanwhile, expected it as it is \
                        served here";
            Err(Error::usage(text).with_hint("repeat the change on the configuration as it is now"))
        }
        ProposalOutcome::NotMember => {
            let text = "this gateway holds no lease, expected a member of the group";
            Err(Error::environment(text).with_hint("`tenmil group status` shows why"))
        }
    }
}

type NextOperation = fn(&mut Member) -> Option<(OperationId, StoreOperation)>;

fn spawn(
    name: &str,
    run: impl FnOnce(&StopFlag) + Send + 'static,
) -> Result<NamedThread<()>, Error> {
    NamedThread::spawn(name, None, run)
        .map_err(|error| Error::environment(format!("start thread {name}: {error}")))
}
