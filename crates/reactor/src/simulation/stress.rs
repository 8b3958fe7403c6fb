//! Randomized stress test: messages in small mailboxes, migrations, exits, devices, deadlines, mode
//! changes, and sleeps in between. Nothing may be lost, duplicated, reordered or missed while
//! asleep.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use tenmil_base::{Instant, Random, Span};
use tenmil_linux::CpuList;

use super::test_pollers::{Alarm, Device, Dozing, FIRST, RELAXED, Ring, Tally, count, tally};
use super::{SimReactorState, Simulation};
use crate::{
    Context, Message, PollMode, PollResult, Poller, PollerBuilder, PollerId, PollerWake, ReactorId,
    ReactorOptions, Sample, ThreadBuilder, ThreadHandle,
};

const SEEDS: u64 = 1_000;
const THREADS: u64 = 5;
const STEPS: usize = 600;
const OUTSIDE: u64 = 99;

/// Messages sent and received, by sender and receiver.
#[derive(Default)]
struct Ledger {
    sent: BTreeMap<(u64, u64), u64>,
    arrived: BTreeMap<(u64, u64), u64>,
    outboxes: BTreeMap<u64, usize>,
}

type Shared = Arc<Mutex<Ledger>>;

/// Sends numbered messages to other threads on request, and checks those that arrive.
struct Courier {
    me: u64,
    peers: Arc<Mutex<Vec<ThreadHandle>>>,
    outbox: VecDeque<u64>,
    ledger: Shared,
}

const TO_SEND: u64 = u64::MAX;

impl Poller for Courier {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        let Some(to) = self.outbox.front().copied() else { return PollResult::Idle };
        let peer = self.peers.lock().unwrap()[usize::try_from(to).unwrap()].clone();
        if send(&self.ledger, self.me, to, &peer) {
            self.outbox.pop_front();
        }
        self.book();
        PollResult::Busy
    }

    fn message(&mut self, [from, number]: [u64; 2], _: &mut Context<'_>) {
        if from == TO_SEND {
            self.outbox.push_back(number);
            return self.book();
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

impl Courier {
    fn book(&self) {
        self.ledger.lock().unwrap().outboxes.insert(self.me, self.outbox.len());
    }
}

fn send(ledger: &Shared, from: u64, to: u64, peer: &ThreadHandle) -> bool {
    // Not held while sending: a send may run other code through the notification.
    let number = ledger.lock().unwrap().sent.get(&(from, to)).copied().unwrap_or_default();
    let sent = peer.send(Message::Data { poller: FIRST, words: [from, number] }).is_ok();
    ledger.lock().unwrap().sent.insert((from, to), number + u64::from(sent));
    sent
}

/// One run of the simulation.
struct Chaos {
    world: Simulation,
    random: Random,
    handles: Arc<Mutex<Vec<ThreadHandle>>>,
    ledger: Shared,
    devices: Vec<Device>,
    alarms: Vec<(Tally, Tally)>,
    rings: Vec<Tally>,
    /// Threads that were told to end.
    mayflies: Vec<ThreadHandle>,
    reactors: u64,
}

impl Chaos {
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
            ledger: Shared::default(),
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
        let courier = Courier { me, peers, outbox: VecDeque::new(), ledger };
        let (next, rung) = (tally(), tally());
        let gap = Span { ns: 20_000_000 + self.random.below(40_000_000) };
        let alarm = Alarm { next: Arc::clone(&next), rung: Arc::clone(&rung), gap };
        let in_flight = tally();
        let ring = Ring::new(&in_flight, 1 + self.random.below(40));
        let device = Device::new();
        let waits = || PollerWake::OnlyWhileBusy("waits for what it has in flight");
        // Some threads park, some never do, and some are prevented by one of their pollers.
        let dozes = self.random.chance(2, 3);
        let all_doze = dozes && self.random.chance(4, 5);
        let beside = Dozing::new(device.clone(), all_doze);
        let mut plan = ThreadBuilder::new(&format!("thread-{me}"))
            .mailbox(4)
            .poller(PollerBuilder::active("courier", waits(), Dozing::new(courier, dozes)))
            .poller(PollerBuilder::active("alarm", PollerWake::Deadline, Dozing::new(alarm, dozes)))
            .poller(PollerBuilder::active("ring", waits(), Dozing::new(ring, dozes)))
            .poller(PollerBuilder::active("device", device.woken_by(), beside));
        let period = Span { ns: 30_000 + self.random.below(200_000) };
        let timed = PollerBuilder::timed("timed", period, super::test_pollers::idle(&tally()));
        if self.random.chance(1, 2) {
            plan = plan.poller(timed);
        }
        let handle = loop {
            match self.world.directory.spawn(plan) {
                Ok(handle) => break handle,
                Err(refused) => plan = *refused.builder,
            }
            self.world.iterate_all(1);
        };
        self.handles.lock().unwrap().push(handle);
        self.devices.push(device);
        self.alarms.push((next, rung));
        self.rings.push(in_flight);
    }

    fn any(&mut self) -> usize {
        usize::try_from(self.random.below(THREADS)).unwrap()
    }

    /// An external event: one of the first `kinds` kinds.
    fn happen(&mut self, kinds: u64) {
        let which = self.any();
        let handle = self.handles.lock().unwrap()[which].clone();
        let reactor = ReactorId(u32::try_from(self.random.below(self.reactors)).unwrap());
        // A returned message was not sent.
        match self.random.below(kinds) {
            0 | 1 => {
                let words = [TO_SEND, self.random.below(THREADS)];
                let _ = handle.send(Message::Data { poller: FIRST, words });
            }
            2 => _ = send(&self.ledger, OUTSIDE, which as u64, &handle),
            3 => _ = self.world.directory.move_thread(handle.id(), reactor),
            4 => self.devices[which].complete(),
            5 => {
                let (ring, more) = (Arc::clone(&self.rings[which]), self.random.below(4));
                let _ = handle.call(move |_| _ = ring.fetch_add(more, RELAXED));
            }
            6 => {
                let poller = PollerId::planned(4);
                let pause = self.random.chance(1, 2);
                let _ = handle.call(move |context| match pause {
                    true => context.pause(poller),
                    false => context.resume(poller),
                });
            }
            7 => {
                let mode = PollMode::ALL[usize::try_from(self.random.below(3)).unwrap()];
                let _ = self.world.directory.set_poll(reactor, mode);
            }
            8 => {
                let mask = self.random.chance(1, 2).then(|| CpuList::from_iter([reactor.0]));
                let _ = self.world.directory.set_mask(handle.id(), mask);
            }
            _ => self.hatch(reactor),
        }
    }

    /// Starts a thread on this reactor that is told to end, possibly a little later.
    fn hatch(&mut self, reactor: ReactorId) {
        let in_flight = tally();
        in_flight.store(self.random.below(3), RELAXED);
        let ring = Ring::new(&in_flight, 1 + self.random.below(40));
        let waits = PollerWake::OnlyWhileBusy("waits for what it has in flight");
        let plan = ThreadBuilder::new("mayfly").poller(PollerBuilder::active("ring", waits, ring));
        let Ok(mayfly) = self.world.directory.spawn(plan) else { return };
        (0..self.random.below(20)).for_each(|_| self.world.step_any());
        let _ = self.world.directory.move_thread(mayfly.id(), reactor);
        (0..self.random.below(20)).for_each(|_| self.world.step_any());
        while self.world.directory.end_thread(mayfly.id()).is_err() {
            self.world.step_any();
        }
        self.mayflies.push(mayfly);
    }

    /// Whether no work is left: must hold whenever all reactors sleep.
    fn check_nothing_is_forgotten(&self, seed: u64) {
        let now = self.world.now();
        let ledger = self.ledger.lock().unwrap();
        for (route, sent) in &ledger.sent {
            let arrived = ledger.arrived.get(route).copied().unwrap_or_default();
            assert_eq!(arrived, *sent, "seed {seed}: {route:?} slept on");
        }
        assert!(ledger.outboxes.values().all(|len| *len == 0), "seed {seed}: an outbox slept on");
        assert!(self.devices.iter().all(Device::is_seen), "seed {seed}: a device slept on");
        assert!(self.rings.iter().all(|ring| count(ring) == 0), "seed {seed}: a ring slept on");
        assert!(self.mayflies.iter().all(ThreadHandle::is_gone), "seed {seed}: an end was lost");
        for (next, rung) in &self.alarms {
            let next = Instant { ns: count(next) };
            assert!(now < next, "seed {seed}: an alarm slept on, {} rung", count(rung));
        }
    }

    /// Whether all threads are within their masks, unless a migration timed out.
    fn check_masks(&self, seed: u64, sample: &Sample) {
        if self.world.kinds().contains(&"migration-timeout") {
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
                self.happen(10);
            }
            self.world.step_any();
            if self.random.chance(1, 50) {
                let sleeping =
                    |stage: &SimReactorState| matches!(stage, SimReactorState::Sleeping(_));
                if self.world.stages().iter().all(sleeping) {
                    self.world.pass_time(Span::from_us(100));
                }
            }
        }
        self.calm_down();
        for _ in 0..10 {
            self.world.run_until_idle();
            self.check_nothing_is_forgotten(seed);
            // A reactor is woken, and may be anywhere on its way back to sleep at the next event.
            self.happen(3);
            (0..self.random.below(200)).for_each(|_| self.world.step_any());
            self.happen(7);
            self.world.run_until_idle();
            self.check_nothing_is_forgotten(seed);
            let end = self.world.now().after(Span::from_ms(50));
            self.world.skip(end);
        }
    }

    /// No more commands; all reactors may sleep.
    fn calm_down(&mut self) {
        self.world.iterate_all(20);
        for reactor in self.world.directory.reactors() {
            while self.world.directory.set_poll(reactor, PollMode::Adaptive).is_err() {
                self.world.iterate_all(1);
            }
        }
    }
}

#[test]
fn nothing_is_lost_doubled_reordered_or_forgotten_asleep() {
    let (mut migrations, mut sleeps, mut messages, mut given_up) = (0, 0, 0, 0);
    for seed in 0..SEEDS {
        let mut chaos = Chaos::new(seed);
        chaos.run(seed);
        let sample = chaos.world.directory.sample(chaos.world.now());
        assert_eq!(sample.threads.len() as u64, THREADS, "seed {seed}");
        chaos.check_masks(seed, &sample);
        assert!(
            !chaos.world.kinds().contains(&"poller-panicked"),
            "seed {seed}: {:?}",
            chaos.world.events()
        );
        migrations += sample.reactors.iter().map(|reactor| reactor.migrations).sum::<u64>();
        sleeps += sample.reactors.iter().map(|reactor| reactor.sleeps).sum::<u64>();
        messages += sample.threads.iter().map(|thread| thread.messages).sum::<u64>();
        given_up += chaos.world.kinds().iter().filter(|kind| **kind == "migration-timeout").count();
    }
    // The test is meaningful only if all of this did happen.
    assert!(
        migrations > SEEDS && sleeps > 10 * SEEDS && messages > 10 * SEEDS,
        "{migrations} {sleeps} {messages}"
    );
    assert!(given_up > 10, "{given_up}");
}
