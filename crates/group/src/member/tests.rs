//! One member with a store in memory, step by step.

use tenmil_base::{Instant, Span};

use super::{Action, Member, MemberConfig, MemberState, OpenedGroup, OperationId, ProposalOutcome};
use crate::store::{StoreOperation, StoreReply};
use crate::{LeaseTiming, MemoryStore};

const TIMING: LeaseTiming = LeaseTiming::of_lease(LeaseTiming::LEASE);

struct Bench {
    member: Member,
    store: MemoryStore,
    now: Instant,
}

impl Bench {
    fn new(name: &str, store: MemoryStore, now: Instant) -> Self {
        let config = MemberConfig {
            name: name.to_owned(),
            addresses: Vec::new(),
            groups: [1].into(),
            configuration: "one".to_owned(),
            timing: TIMING,
            injected_bug: None,
        };
        Self { member: Member::new(config, 7), store, now }
    }

    fn next_operation(&mut self) -> Option<(OperationId, StoreOperation)> {
        self.member.step(self.now);
        self.member.next_lease_operation().or_else(|| self.member.next_map_operation())
    }

    /// Executes operations, and opens and closes devices, until nothing is left to do.
    fn run(&mut self) {
        loop {
            if let Some((id, operation)) = self.next_operation() {
                let reply = self.store.execute_at(self.now, &operation);
                self.member.handle_reply(self.now, id, reply);
                continue;
            }
            match self.member.next_action() {
                Some(Action::Open { group }) => {
                    self.member.handle_opened(self.now, group, Some(OpenedGroup::default()));
                }
                Some(Action::Close { group }) => self.member.handle_closed(self.now, group),
                Some(_) => {}
                None => return,
            }
        }
    }

    /// Runs until the member sends an operation of a kind, which is not executed.
    fn run_until(&mut self, is_it: fn(&StoreOperation) -> bool) -> (OperationId, StoreOperation) {
        loop {
            let (id, operation) = self.next_operation().expect("an operation of that kind");
            if is_it(&operation) {
                return (id, operation);
            }
            let reply = self.store.execute_at(self.now, &operation);
            self.member.handle_reply(self.now, id, reply);
        }
    }
}

#[test]
fn lease_counts_from_the_sending_of_the_renewal() {
    let start = Instant { ns: 1_000_000_000 };
    let mut bench = Bench::new("a", MemoryStore::default(), start);
    bench.run();
    assert_eq!(bench.member.serving_until(), start.after(TIMING.serving_time()));
    bench.now = start.after(TIMING.renewal_interval());
    let sent = bench.now;
    let (id, operation) = bench.run_until(|it| matches!(it, StoreOperation::Renew(_)));
    bench.now = sent.after(Span::from_ms(400));
    let reply = bench.store.execute_at(bench.now, &operation);
    bench.member.handle_reply(bench.now, id, reply);
    assert_eq!(bench.member.serving_until(), sent.after(TIMING.serving_time()));
}

#[test]
fn late_renewal_does_not_start_a_member_again_that_has_stopped() {
    let start = Instant { ns: 1_000_000_000 };
    let mut bench = Bench::new("a", MemoryStore::default(), start);
    bench.run();
    bench.now = start.after(TIMING.renewal_interval());
    let (id, _) = bench.run_until(|it| matches!(it, StoreOperation::Renew(_)));
    // The process was stopped after the store had executed it.
    bench.now = start.after(Span::from_secs(2)).after(Span::from_ms(480));
    bench.member.handle_reply(bench.now, id, StoreReply::Done);
    assert_eq!(bench.member.serving_until(), Instant::default());
    assert_eq!(bench.member.status().state, MemberState::AwaitingClose);
}

#[test]
fn claim_fails_if_the_lease_of_its_sender_has_ended() {
    let mut bench = Bench::new("a", MemoryStore::default(), Instant { ns: 1 });
    let is_claim = |it: &StoreOperation| match it {
        StoreOperation::Commit(it) => it.puts.iter().any(|put| put.key == "group/1"),
        _ => false,
    };
    let (_, claim) = bench.run_until(is_claim);
    let mut other = bench.store.clone();
    assert_eq!(bench.store.execute_at(bench.now, &claim), StoreReply::Committed);
    let late = bench.now.after(TIMING.lease);
    assert_eq!(other.execute_at(late, &claim), StoreReply::Conflict);
}

#[test]
fn slot_of_a_former_member_has_ended_and_those_of_this_process_have_not() {
    let start = Instant { ns: 1 };
    let mut former = Bench::new("a", MemoryStore::default(), start);
    former.run();
    assert_eq!(former.member.status().slot, Some(0));
    let mut bench = Bench::new("b", former.store, start);
    bench.run();
    assert_eq!(bench.member.status().slot, Some(1));
    let has_ended = |bench: &Bench, slot| bench.member.has_slot_ended(bench.now, slot);
    assert!(!has_ended(&bench, 0), "its lease is in force");
    for _ in 0..8 {
        bench.now = bench.now.after(TIMING.renewal_interval());
        bench.run();
    }
    assert!(has_ended(&bench, 0));
    assert!(!has_ended(&bench, 1));
    // This member loses its lease as well, and joins again.
    bench.now = bench.now.after(TIMING.lease);
    bench.run();
    assert_eq!(bench.member.status().slot, Some(2));
    assert!(has_ended(&bench, 0));
    assert!(!has_ended(&bench, 1), "this process knows its own controllers");
    bench.now = bench.now.after(TIMING.lease).after(Span::from_ms(1));
    assert!(!has_ended(&bench, 0), "the snapshot is old");
}

impl Bench {
    /// The same store with a member of another name, whose process was started with this configuration.
    fn with_member(&self, name: &str, configuration: &str) -> Self {
        let mut other = Self::new(name, self.store.clone(), self.now);
        let config =
            MemberConfig { configuration: configuration.to_owned(), ..other.member.config.clone() };
        other.member = Member::new(config, 9);
        other
    }

    fn state(&self) -> MemberState {
        self.member.status().state
    }

    /// Runs, and returns the configuration that is to be applied.
    fn offered_configuration(&mut self) -> Option<String> {
        self.member.handle_change(self.now);
        while let Some((id, operation)) = self.next_operation() {
            let reply = self.store.execute_at(self.now, &operation);
            self.member.handle_reply(self.now, id, reply);
        }
        match self.member.next_action() {
            Some(Action::Configure { configuration }) => Some(configuration),
            _ => None,
        }
    }
}

#[test]
fn member_with_another_configuration_does_not_join_a_group_that_has_members() {
    let mut first = Bench::new("a", MemoryStore::default(), Instant { ns: 1 });
    first.run();
    assert_eq!(first.state(), MemberState::Joined);
    let mut other = first.with_member("b", "two");
    other.run();
    assert_eq!(other.state(), MemberState::AwaitingConfiguration);
    assert_eq!(other.member.differing_configuration(), Some("one"));
    let mut same = first.with_member("b", "one");
    same.run();
    assert_eq!(same.state(), MemberState::Joined);
    // Nobody is there: the first one defines the configuration.
    let mut later = first.with_member("b", "two");
    later.now = later.now.after(TIMING.lease);
    later.run();
    assert_eq!(later.state(), MemberState::Joined);
    let StoreReply::Snapshot(map) = later.store.execute_at(later.now, &StoreOperation::Read) else {
        panic!()
    };
    assert_eq!(map.entries["configuration"].value, "two");
}

#[test]
fn change_of_the_configuration_reaches_the_others_and_a_second_one_conflicts() {
    let mut first = Bench::new("a", MemoryStore::default(), Instant { ns: 1 });
    first.run();
    let mut second = first.with_member("b", "one");
    second.run();
    first.store = second.store.clone();
    first.member.propose_configuration(first.now, "two".to_owned());
    first.run();
    assert_eq!(first.member.take_proposal_outcome(), Some(ProposalOutcome::Adopted));
    assert_eq!(first.member.take_proposal_outcome(), None, "reported once");
    // The other one has not applied it yet, so its change is of an old configuration.
    second.store = first.store.clone();
    second.member.propose_configuration(second.now, "three".to_owned());
    assert_eq!(second.offered_configuration().as_deref(), Some("two"));
    assert_eq!(second.member.take_proposal_outcome(), Some(ProposalOutcome::Conflict));
    assert_eq!(second.offered_configuration(), None, "offered once");
    second.member.handle_configured(second.now, "two".to_owned(), true);
    second.member.propose_configuration(second.now, "three".to_owned());
    second.run();
    assert_eq!(second.member.take_proposal_outcome(), Some(ProposalOutcome::Adopted));
}

#[test]
fn member_that_was_away_adopts_the_configuration_when_it_joins_again() {
    let mut away = Bench::new("a", MemoryStore::default(), Instant { ns: 1 });
    away.run();
    let mut other = away.with_member("b", "one");
    other.run();
    other.now = other.now.after(TIMING.lease);
    other.run();
    other.member.propose_configuration(other.now, "two".to_owned());
    other.run();
    assert_eq!(other.member.take_proposal_outcome(), Some(ProposalOutcome::Adopted));
    (away.store, away.now) = (other.store.clone(), other.now);
    away.run();
    assert_eq!(away.state(), MemberState::AwaitingConfiguration);
    away.member.handle_configured(away.now, "two".to_owned(), true);
    away.run();
    assert_eq!(away.state(), MemberState::Joined);
    assert_eq!(away.member.differing_configuration(), None);
}

#[test]
fn group_whose_device_is_lost_is_left_to_others() {
    let mut bench = Bench::new("a", MemoryStore::default(), Instant { ns: 1 });
    bench.run();
    let phase = |bench: &Bench| bench.member.status().phases[&1].clone();
    assert_eq!(phase(&bench), super::GroupPhase::Active);
    bench.member.handle_lost_device(bench.now, 1);
    bench.run();
    assert_eq!(phase(&bench), super::GroupPhase::Idle);
    let status = bench.member.status();
    assert_eq!(status.groups[&1].0.owner, None, "released");
    assert_eq!(status.members["a"].refused, [1]);
    // It is tried again after a while, and the lease is renewed meanwhile.
    for _ in 0..40 {
        bench.now = bench.now.after(TIMING.renewal_interval());
        bench.run();
    }
    assert_eq!(phase(&bench), super::GroupPhase::Active);
}
