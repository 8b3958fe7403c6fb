//! Everything at once, thousands of times: messages in small mailboxes, moves, ends, devices,
//! deadlines, changes of mode, and sleeps in between. Nothing may be lost, doubled, reordered or
//! forgotten asleep.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use base::{Instant, Random, Span};
use host::Cores;

use super::crew::{Alarm, Device, Dozing, FIRST, RELAXED, Ring, Tally, count, tally};
use super::{Stage, World};
use crate::{
    Context, Found, Handle, Message, PollMode, Poller, PollerId, ReactorId, ReactorOptions,
    Registration, Sample, ThreadPlan, WokenBy,
};

const SEEDS: u64 = 1_000;
const THREADS: u64 = 5;
const STEPS: usize = 600;
const OUTSIDE: u64 = 99;

/// What was sent and what arrived, by sender and receiver.
#[derive(Default)]
struct Ledger {
    sent: BTreeMap<(u64, u64), u64>,
    arrived: BTreeMap<(u64, u64), u64>,
    outboxes: BTreeMap<u64, usize>,
}

type Shared = Arc<Mutex<Ledger>>;

/// Sends numbered messages to other threads when it is told to, and checks those that arrive.
struct Courier {
    me: u64,
    peers: Arc<Mutex<Vec<Handle>>>,
    outbox: VecDeque<u64>,
    ledger: Shared,
}

const TO_SEND: u64 = u64::MAX;

impl Poller for Courier {
    fn poll(&mut self, _: &mut Context<'_>) -> Found {
        let Some(to) = self.outbox.front().copied() else { return Found::Nothing };
        let peer = self.peers.lock().unwrap()[usize::try_from(to).unwrap()].clone();
        if send(&self.ledger, self.me, to, &peer) {
            self.outbox.pop_front();
        }
        self.book();
        Found::Work
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

fn send(ledger: &Shared, from: u64, to: u64, peer: &Handle) -> bool {
    // Not held while sending: nothing else may run, but a bell is rung.
    let number = ledger.lock().unwrap().sent.get(&(from, to)).copied().unwrap_or_default();
    let sent = peer.send(Message::Words { poller: FIRST, words: [from, number] }).is_ok();
    ledger.lock().unwrap().sent.insert((from, to), number + u64::from(sent));
    sent
}

/// A run of the world.
struct Chaos {
    world: World,
    random: Random,
    handles: Arc<Mutex<Vec<Handle>>>,
    ledger: Shared,
    devices: Vec<Device>,
    alarms: Vec<(Tally, Tally)>,
    rings: Vec<Tally>,
    /// Threads that were told to end.
    mayflies: Vec<Handle>,
    reactors: u64,
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0xc0ff_ee00);
        let reactors = 2 + random.below(2);
        let inbox = 1 << random.below(4);
        let drain_max = Span::from_us(200 + random.below(2_000));
        let options = ReactorOptions { inbox, drain_max, ..ReactorOptions::default() };
        let world = World::new(seed, u32::try_from(reactors).unwrap(), &options);
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
        let waits = || WokenBy::OnlyWhileBusy("waits for what it has in flight");
        // Some threads doze, some never do, and some would but for one of their pollers.
        let dozes = self.random.chance(2, 3);
        let all_doze = dozes && self.random.chance(4, 5);
        let beside = Dozing::new(device.clone(), all_doze);
        let mut plan = ThreadPlan::new(&format!("thread-{me}"))
            .mailbox(4)
            .poller(Registration::active("courier", waits(), Dozing::new(courier, dozes)))
            .poller(Registration::active("alarm", WokenBy::Deadline, Dozing::new(alarm, dozes)))
            .poller(Registration::active("ring", waits(), Dozing::new(ring, dozes)))
            .poller(Registration::active("device", device.woken_by(), beside));
        let period = Span { ns: 30_000 + self.random.below(200_000) };
        let timed = Registration::timed("timed", period, super::crew::idle(&tally()));
        if self.random.chance(1, 2) {
            plan = plan.poller(timed);
        }
        let handle = loop {
            match self.world.directory.spawn(plan) {
                Ok(handle) => break handle,
                Err(refused) => plan = *refused.plan,
            }
            self.world.turn_all(1);
        };
        self.handles.lock().unwrap().push(handle);
        self.devices.push(device);
        self.alarms.push((next, rung));
        self.rings.push(in_flight);
    }

    fn any(&mut self) -> usize {
        usize::try_from(self.random.below(THREADS)).unwrap()
    }

    /// Something that happens from outside: one of the first `kinds` kinds of things.
    fn happen(&mut self, kinds: u64) {
        let which = self.any();
        let handle = self.handles.lock().unwrap()[which].clone();
        let reactor = ReactorId(u32::try_from(self.random.below(self.reactors)).unwrap());
        // A message that is given back was not sent, and nothing is owed for it.
        match self.random.below(kinds) {
            0 | 1 => {
                let words = [TO_SEND, self.random.below(THREADS)];
                let _ = handle.send(Message::Words { poller: FIRST, words });
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
                let mask = self.random.chance(1, 2).then(|| Cores::from_iter([reactor.0]));
                let _ = self.world.directory.set_mask(handle.id(), mask);
            }
            _ => self.hatch(reactor),
        }
    }

    /// Starts a thread that is sent to this reactor and told to end, maybe a little later.
    fn hatch(&mut self, reactor: ReactorId) {
        let in_flight = tally();
        in_flight.store(self.random.below(3), RELAXED);
        let ring = Ring::new(&in_flight, 1 + self.random.below(40));
        let waits = WokenBy::OnlyWhileBusy("waits for what it has in flight");
        let plan = ThreadPlan::new("mayfly").poller(Registration::active("ring", waits, ring));
        let Ok(mayfly) = self.world.directory.spawn(plan) else { return };
        (0..self.random.below(20)).for_each(|_| self.world.step_any());
        let _ = self.world.directory.move_thread(mayfly.id(), reactor);
        (0..self.random.below(20)).for_each(|_| self.world.step_any());
        while self.world.directory.end_thread(mayfly.id()).is_err() {
            self.world.step_any();
        }
        self.mayflies.push(mayfly);
    }

    /// Whether nobody has anything left to do: to be true whenever everybody sleeps.
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
        assert!(self.mayflies.iter().all(Handle::is_gone), "seed {seed}: an end was lost");
        for (next, rung) in &self.alarms {
            let next = Instant { ns: count(next) };
            assert!(now < next, "seed {seed}: an alarm slept on, {} rung", count(rung));
        }
    }

    /// Whether everybody lives where its mask allows, unless a move was given up.
    fn check_masks(&self, seed: u64, sample: &Sample) {
        if self.world.kinds().contains(&"move-given-up") {
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
                let asleep = |stage: &Stage| matches!(stage, Stage::Asleep(_));
                if self.world.stages().iter().all(asleep) {
                    self.world.pass_time(Span::from_us(100));
                }
            }
        }
        self.calm_down();
        for _ in 0..10 {
            self.world.settle();
            self.check_nothing_is_forgotten(seed);
            // Somebody is woken, and is anywhere on the way back to sleep when something happens.
            self.happen(3);
            (0..self.random.below(200)).for_each(|_| self.world.step_any());
            self.happen(7);
            self.world.settle();
            self.check_nothing_is_forgotten(seed);
            let end = self.world.now().after(Span::from_ms(50));
            self.world.skip(end);
        }
    }

    /// No more orders; all reactors may sleep.
    fn calm_down(&mut self) {
        self.world.turn_all(20);
        for reactor in self.world.directory.reactors() {
            while self.world.directory.set_poll(reactor, PollMode::Adaptive).is_err() {
                self.world.turn_all(1);
            }
        }
    }
}

#[test]
fn nothing_is_lost_doubled_reordered_or_forgotten_asleep() {
    let (mut moves, mut sleeps, mut messages, mut given_up) = (0, 0, 0, 0);
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
        moves += sample.reactors.iter().map(|reactor| reactor.moves).sum::<u64>();
        sleeps += sample.reactors.iter().map(|reactor| reactor.sleeps).sum::<u64>();
        messages += sample.threads.iter().map(|thread| thread.messages).sum::<u64>();
        given_up += chaos.world.kinds().iter().filter(|kind| **kind == "move-given-up").count();
    }
    // The test is worth something only if all of this did happen.
    assert!(
        moves > SEEDS && sleeps > 10 * SEEDS && messages > 10 * SEEDS,
        "{moves} {sleeps} {messages}"
    );
    assert!(given_up > 10, "{given_up}");
}
