//! Randomized stress test: messages in small mailboxes, migrations, exits, devices, deadlines, mode
//! changes, and sleeps in between. Nothing may be lost, duplicated, reordered or missed while
//! asleep.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use tenmil_base::{Instant, Random, Span};
use tenmil_linux::CpuList;

use super::test_pollers::{
    DeadlinePoller, FIRST, InterruptingDevice, ParkingPoller, PinnedRingPoller, RELAXED,
    SharedCount, count_of, new_count,
};
use super::{SimReactorState, Simulation};
use crate::{
    Context, Message, PollMode, PollResult, Poller, PollerBuilder, PollerId, PollerWake, ReactorId,
    ReactorOptions, StatisticsSample, ThreadBuilder, ThreadHandle,
};

const SEEDS: u64 = 1_000;
const THREADS: u64 = 5;
const STEPS: usize = 600;
const OUTSIDE: u64 = 99;

/// Messages sent and received, by sender and receiver.
#[derive(Default)]
struct MessageLedger {
    sent: BTreeMap<(u64, u64), u64>,
    arrived: BTreeMap<(u64, u64), u64>,
    outboxes: BTreeMap<u64, usize>,
}

type SharedLedger = Arc<Mutex<MessageLedger>>;

/// Sends numbered messages to other threads on request, and checks those that arrive.
struct MessagingPoller {
    me: u64,
    peers: Arc<Mutex<Vec<ThreadHandle>>>,
    outbox: VecDeque<u64>,
    ledger: SharedLedger,
}

const TO_SEND: u64 = u64::MAX;

impl Poller for MessagingPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        let Some(to) = self.outbox.front().copied() else { return PollResult::Idle };
        let peer = self.peers.lock().unwrap()[usize::try_from(to).unwrap()].clone();
        if send_next_numbered(&self.ledger, self.me, to, &peer) {
            self.outbox.pop_front();
        }
        self.record_message();
        PollResult::Busy
    }

    fn handle_message(&mut self, [from, number]: [u64; 2], _: &mut Context<'_>) {
        if from == TO_SEND {
            self.outbox.push_back(number);
            return self.record_message();
        }
        let mut ledger = self.ledger.lock().unwrap();
        let arrived = ledger.arrived.entry((from, self.me)).or_default();
        assert_eq!(number, *arrived, "from {from} to {}: lost, doubled or reordered", self.me);
        *arrived += 1;
    }

    fn is_busy(&self) -> Option<bool> {
        Some(!self.outbox.is_empty())
    }
}

impl MessagingPoller {
    fn record_message(&self) {
        self.ledger.lock().unwrap().outboxes.insert(self.me, self.outbox.len());
    }
}

fn send_next_numbered(ledger: &SharedLedger, from: u64, to: u64, peer: &ThreadHandle) -> bool {
    // Not held while sending: a send may run other code through the notification.
    let number = ledger.lock().unwrap().sent.get(&(from, to)).copied().unwrap_or_default();
    let sent = peer.send(Message::Data { poller: FIRST, words: [from, number] }).is_ok();
    ledger.lock().unwrap().sent.insert((from, to), number + u64::from(sent));
    sent
}

/// One run of the simulation.
struct StressRun {
    world: Simulation,
    random: Random,
    handles: Arc<Mutex<Vec<ThreadHandle>>>,
    ledger: SharedLedger,
    devices: Vec<InterruptingDevice>,
    alarms: Vec<(SharedCount, SharedCount)>,
    rings: Vec<SharedCount>,
    /// Threads that were told to end.
    mayflies: Vec<ThreadHandle>,
    reactors: u64,
}

impl StressRun {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0xc0ff_ee00);
        let reactors = 2 + random.below(2);
        let inbox = 1 << random.below(4);
        let drain_max = Span::from_us(200 + random.below(2_000));
        let options = ReactorOptions { inbox, drain_max, ..ReactorOptions::default() };
        let world = Simulation::new(seed, u32::try_from(reactors).unwrap(), &options);
        let mut chaos = Self {
            world,
            random,
            handles: Arc::default(),
            ledger: SharedLedger::default(),
            devices: Vec::new(),
            alarms: Vec::new(),
            rings: Vec::new(),
            mayflies: Vec::new(),
            reactors,
        };
        (0..THREADS).for_each(|me| chaos.spawn(me));
        chaos
    }

    fn spawn(&mut self, me: u64) {
        let (peers, ledger) = (Arc::clone(&self.handles), Arc::clone(&self.ledger));
        let courier = MessagingPoller { me, peers, outbox: VecDeque::new(), ledger };
        let (next, rung) = (new_count(), new_count());
        let gap = Span { ns: 20_000_000 + self.random.below(40_000_000) };
        let alarm = DeadlinePoller { next: Arc::clone(&next), rung: Arc::clone(&rung), gap };
        let in_flight = new_count();
        let ring = PinnedRingPoller::new(&in_flight, 1 + self.random.below(40));
        let device = InterruptingDevice::new();
        let waits = || PollerWake::OnlyWhileBusy("waits for what it has in flight");
        // Some threads park, some never do, and some are prevented by one of their pollers.
        let dozes = self.random.chance(2, 3);
        let all_doze = dozes && self.random.chance(4, 5);
        let beside = ParkingPoller::new(device.clone(), all_doze);
        let mut plan = ThreadBuilder::new(&format!("thread-{me}"))
            .mailbox_size(4)
            .add_poller(PollerBuilder::polled_each_iteration(
                "courier",
                waits(),
                ParkingPoller::new(courier, dozes),
            ))
            .add_poller(PollerBuilder::polled_each_iteration(
                "alarm",
                PollerWake::Deadline,
                ParkingPoller::new(alarm, dozes),
            ))
            .add_poller(PollerBuilder::polled_each_iteration(
                "ring",
                waits(),
                ParkingPoller::new(ring, dozes),
            ))
            .add_poller(PollerBuilder::polled_each_iteration(
                "device",
                device.poller_wake(),
                beside,
            ));
        let period = Span { ns: 30_000 + self.random.below(200_000) };
        let timed = PollerBuilder::polled_each_period(
            "timed",
            period,
            super::test_pollers::idle_poller(&new_count()),
        );
        if self.random.chance(1, 2) {
            plan = plan.add_poller(timed);
        }
        let handle = loop {
            match self.world.directory.spawn(plan) {
                Ok(handle) => break handle,
                Err(refused) => plan = *refused.builder,
            }
            self.world.step_all(1);
        };
        self.handles.lock().unwrap().push(handle);
        self.devices.push(device);
        self.alarms.push((next, rung));
        self.rings.push(in_flight);
    }

    fn random_thread(&mut self) -> usize {
        usize::try_from(self.random.below(THREADS)).unwrap()
    }

    /// An external event: one of the first `kinds` kinds.
    fn inject_event(&mut self, kinds: u64) {
        let which = self.random_thread();
        let handle = self.handles.lock().unwrap()[which].clone();
        let reactor = ReactorId(u32::try_from(self.random.below(self.reactors)).unwrap());
        // A returned message was not sent.
        match self.random.below(kinds) {
            0 | 1 => {
                let words = [TO_SEND, self.random.below(THREADS)];
                let _ = handle.send(Message::Data { poller: FIRST, words });
            }
            2 => _ = send_next_numbered(&self.ledger, OUTSIDE, which as u64, &handle),
            3 => _ = self.world.directory.migrate_thread(handle.id(), reactor),
            4 => self.devices[which].complete_and_signal(),
            5 => {
                let (ring, more) = (Arc::clone(&self.rings[which]), self.random.below(4));
                let _ = handle.send_closure(move |_| _ = ring.fetch_add(more, RELAXED));
            }
            6 => {
                let poller = PollerId::of_builder_index(4);
                let pause = self.random.chance(1, 2);
                let _ = handle.send_closure(move |context| match pause {
                    true => context.pause_poller(poller),
                    false => context.resume_poller(poller),
                });
            }
            7 => {
                let mode = PollMode::ALL[usize::try_from(self.random.below(3)).unwrap()];
                let _ = self.world.directory.set_poll_mode(reactor, mode);
            }
            8 => {
                let mask = self.random.chance(1, 2).then(|| CpuList::from_iter([reactor.0]));
                let _ = self.world.directory.set_thread_mask(handle.id(), mask);
            }
            _ => self.spawn_ending_thread(reactor),
        }
    }

    /// Starts a thread on this reactor that is told to end, possibly a little later.
    fn spawn_ending_thread(&mut self, reactor: ReactorId) {
        let in_flight = new_count();
        in_flight.store(self.random.below(3), RELAXED);
        let ring = PinnedRingPoller::new(&in_flight, 1 + self.random.below(40));
        let waits = PollerWake::OnlyWhileBusy("waits for what it has in flight");
        let plan = ThreadBuilder::new("mayfly")
            .add_poller(PollerBuilder::polled_each_iteration("ring", waits, ring));
        let Ok(mayfly) = self.world.directory.spawn(plan) else { return };
        (0..self.random.below(20)).for_each(|_| self.world.step_random_reactor());
        let _ = self.world.directory.migrate_thread(mayfly.id(), reactor);
        (0..self.random.below(20)).for_each(|_| self.world.step_random_reactor());
        while self.world.directory.end_thread(mayfly.id()).is_err() {
            self.world.step_random_reactor();
        }
        self.mayflies.push(mayfly);
    }

    /// Whether no work is left: must hold whenever all reactors sleep.
    fn check_no_pending_work(&self, seed: u64) {
        let now = self.world.now();
        let ledger = self.ledger.lock().unwrap();
        for (route, sent) in &ledger.sent {
            let arrived = ledger.arrived.get(route).copied().unwrap_or_default();
            assert_eq!(arrived, *sent, "seed {seed}: {route:?} slept on");
        }
        assert!(ledger.outboxes.values().all(|len| *len == 0), "seed {seed}: an outbox slept on");
        assert!(
            self.devices.iter().all(InterruptingDevice::is_completion_handled),
            "seed {seed}: a device slept on"
        );
        assert!(self.rings.iter().all(|ring| count_of(ring) == 0), "seed {seed}: a ring slept on");
        assert!(self.mayflies.iter().all(ThreadHandle::has_ended), "seed {seed}: an end was lost");
        for (next, rung) in &self.alarms {
            let next = Instant { ns: count_of(next) };
            assert!(now < next, "seed {seed}: an alarm slept on, {} rung", count_of(rung));
        }
    }

    /// Whether all threads are within their masks, unless a migration timed out.
    fn check_masks(&self, seed: u64, sample: &StatisticsSample) {
        if self.world.event_kinds().contains(&"migration-timeout") {
            return;
        }
        for thread in &sample.threads {
            let allows = thread.mask.as_ref().is_none_or(|mask| mask.contains(thread.home.0));
            assert!(allows, "seed {seed}: {thread:?} is outside its mask");
        }
    }

    fn run(&mut self, seed: u64) {
        for _ in 0..STEPS {
            if self.random.chance(1, 6) {
                self.inject_event(10);
            }
            self.world.step_random_reactor();
            if self.random.chance(1, 50) {
                let sleeping =
                    |stage: &SimReactorState| matches!(stage, SimReactorState::Sleeping(_));
                if self.world.reactor_states().iter().all(sleeping) {
                    self.world.advance_clock(Span::from_us(100));
                }
            }
        }
        self.set_all_adaptive();
        for _ in 0..10 {
            self.world.run_until_idle();
            self.check_no_pending_work(seed);
            // A reactor is woken, and may be anywhere on its way back to sleep at the next event.
            self.inject_event(3);
            (0..self.random.below(200)).for_each(|_| self.world.step_random_reactor());
            self.inject_event(7);
            self.world.run_until_idle();
            self.check_no_pending_work(seed);
            let end = self.world.now().after(Span::from_ms(50));
            self.world.run_to_next_deadline(end);
        }
    }

    /// No more commands; all reactors may sleep.
    fn set_all_adaptive(&mut self) {
        self.world.step_all(20);
        for reactor in self.world.directory.reactors() {
            while self.world.directory.set_poll_mode(reactor, PollMode::Adaptive).is_err() {
                self.world.step_all(1);
            }
        }
    }
}

#[test]
fn random_events_lose_duplicate_or_reorder_no_message() {
    let (mut migrations, mut sleeps, mut messages, mut given_up) = (0, 0, 0, 0);
    for seed in 0..SEEDS {
        let mut chaos = StressRun::new(seed);
        chaos.run(seed);
        let sample = chaos.world.directory.sample_statistics(chaos.world.now());
        assert_eq!(sample.threads.len() as u64, THREADS, "seed {seed}");
        chaos.check_masks(seed, &sample);
        assert!(
            !chaos.world.event_kinds().contains(&"poller-panicked"),
            "seed {seed}: {:?}",
            chaos.world.events()
        );
        migrations += sample.reactors.iter().map(|reactor| reactor.migrations).sum::<u64>();
        sleeps += sample.reactors.iter().map(|reactor| reactor.sleeps).sum::<u64>();
        messages += sample.threads.iter().map(|thread| thread.messages).sum::<u64>();
        given_up +=
            chaos.world.event_kinds().iter().filter(|kind| **kind == "migration-timeout").count();
    }
    // The test is meaningful only if all of this did happen.
    assert!(
        migrations > SEEDS && sleeps > 10 * SEEDS && messages > 10 * SEEDS,
        "{migrations} {sleeps} {messages}"
    );
    assert!(given_up > 10, "{given_up}");
}
