//! One member with a store in memory, step by step.

use tenmil_base::{Instant, Span};

use super::{Action, Member, MemberConfig, MemberState, OpenedGroup, OperationId};
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
