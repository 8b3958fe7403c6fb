//! The ring and the handshake under a model checker, in every order that the memory model allows.
//!
//! The two files are the very ones that are shipped; only the words of `sync` mean the checker's
//! types here. A thread that waits for what never comes is a deadlock, which the checker reports; so
//! is a message that is never dropped.

#![allow(clippy::duplicate_mod, reason = "that is the point of it")]

#[path = "bell/doze.rs"]
#[allow(unreachable_pub, reason = "the crate exports it, the models do not")]
mod doze;
#[path = "bell/handshake.rs"]
mod handshake;
#[path = "mailbox/ring.rs"]
#[allow(dead_code, unreachable_pub, reason = "the models need a part of it")]
mod ring;

/// The words of `crate::sync`, in the checker's types.
mod sync {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::Arc;
    use loom::sync::atomic::fence;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    pub(crate) use loom::thread::yield_now as give_way;

    pub(crate) use super::interrupt::Interrupt;

    /// What `crate::barrier` does, as far as it can be observed.
    #[derive(Clone, Debug)]
    pub(crate) enum Barrier {
        /// `membarrier(2)`: a full fence in the sleeper, and one in the other thread, somewhere.
        Expedited(Interrupt),
        Fences,
        /// What must not be shipped.
        Missing,
    }

    impl Barrier {
        pub(crate) fn light(&self) {
            match self {
                Self::Expedited(interrupt) => interrupt.may_come(),
                Self::Fences => fence(Ordering::SeqCst),
                Self::Missing => {}
            }
        }

        pub(crate) fn heavy(&self) -> bool {
            match self {
                Self::Expedited(interrupt) => interrupt.send(),
                Self::Fences => fence(Ordering::SeqCst),
                Self::Missing => {}
            }
            true
        }
    }
}

/// The interrupt by which the kernel makes another processor execute a full fence.
mod interrupt {
    use std::sync::atomic::AtomicUsize;

    use loom::sync::Arc;
    use loom::sync::atomic::{Ordering, fence};

    use super::signal::Signal;

    /// It comes at one of the places that the interrupted thread passes, and whoever sent it waits
    /// until it has come.
    #[derive(Clone, Debug)]
    pub(crate) struct Interrupt {
        place: usize,
        /// How many places the interrupted thread has passed. No other looks at it.
        passed: Arc<AtomicUsize>,
        sent: Arc<Signal>,
        came: Arc<Signal>,
    }

    impl Interrupt {
        /// One that comes at the place with this number, from 0.
        pub(crate) fn at(place: usize) -> Self {
            let passed = Arc::new(AtomicUsize::new(0));
            Self { place, passed, sent: Arc::default(), came: Arc::default() }
        }

        /// The interrupted thread passes a place.
        pub(crate) fn may_come(&self) {
            if self.passed.fetch_add(1, Ordering::Relaxed) == self.place {
                self.come();
            }
        }

        /// It passes the last place: if it has not come before, it comes now.
        pub(crate) fn comes_at_last(&self) {
            if self.passed.load(Ordering::Relaxed) <= self.place {
                self.come();
            }
        }

        fn come(&self) {
            self.sent.wait();
            fence(Ordering::SeqCst);
            self.came.give();
        }

        pub(crate) fn send(&self) {
            fence(Ordering::SeqCst);
            self.sent.give();
            self.came.wait();
            fence(Ordering::SeqCst);
        }
    }
}

/// An event descriptor: what is given before a wait ends it.
mod signal {
    use loom::sync::{Condvar, Mutex};

    #[derive(Debug)]
    pub(super) struct Signal {
        given: Mutex<bool>,
        changed: Condvar,
    }

    impl Default for Signal {
        fn default() -> Self {
            Self { given: Mutex::new(false), changed: Condvar::new() }
        }
    }

    impl Signal {
        pub(super) fn give(&self) {
            *self.given.lock().unwrap() = true;
            self.changed.notify_one();
        }

        pub(super) fn wait(&self) {
            let mut given = self.given.lock().unwrap();
            while !*given {
                given = self.changed.wait(given).unwrap();
            }
            *given = false;
        }
    }
}

mod ring_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::ring::{Receiver, Sender, mailbox};

    /// A message that the checker misses if it is not dropped, and whose bytes it guards.
    type Message = (u32, Arc<()>);

    fn message(number: u32) -> Message {
        (number, Arc::new(()))
    }

    /// Sends in order, again and again while the ring is full.
    fn send_all(sender: &Sender<Message>, numbers: impl Iterator<Item = u32>) {
        for number in numbers {
            let mut unsent = message(number);
            while let Err(refused) = sender.send(unsent) {
                unsent = refused;
                thread::yield_now();
            }
        }
    }

    fn receive_next(receiver: &mut Receiver<Message>) -> u32 {
        loop {
            match receiver.receive() {
                Some((number, _)) => return number,
                None => thread::yield_now(),
            }
        }
    }

    fn receive_rest(receiver: &mut Receiver<Message>, into: &mut Vec<Message>) {
        while receiver.receive_many(into, 2) > 0 {}
    }

    #[test]
    fn two_senders_lose_and_double_nothing() {
        loom::model(|| {
            let (sender, mut receiver) = mailbox(2);
            let start = |number| {
                let sender: Sender<Message> = sender.clone();
                thread::spawn(move || sender.send(message(number)).is_ok())
            };
            let (one, two) = (start(1), start(2));
            let mut received = Vec::new();
            receiver.receive_many(&mut received, 2);
            assert!(one.join().unwrap() && two.join().unwrap(), "there was room for both");
            receive_rest(&mut receiver, &mut received);
            let mut numbers: Vec<_> = received.iter().map(|(number, _)| *number).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, [1, 2]);
        });
    }

    #[test]
    fn a_full_ring_refuses_and_its_slots_are_used_again_in_order() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (sender, mut receiver) = mailbox(1);
            let other = thread::spawn(move || send_all(&sender, 0..3));
            for number in 0..3 {
                assert_eq!(receive_next(&mut receiver), number);
            }
            other.join().unwrap();
            assert!(receiver.is_empty());
        });
    }

    #[test]
    fn two_senders_share_a_ring_that_is_full_and_wraps() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (sender, mut receiver) = mailbox(1);
            let start = |numbers: [u32; 2]| {
                let sender: Sender<Message> = sender.clone();
                let taken = move |number: &u32| sender.send(message(*number)).is_ok();
                thread::spawn(move || numbers.into_iter().filter(taken).collect::<Vec<_>>())
            };
            let (one, two) = (start([10, 11]), start([20, 21]));
            let mut received = Vec::new();
            receiver.receive_many(&mut received, 1);
            receiver.receive_many(&mut received, 1);
            let taken = [one.join().unwrap(), two.join().unwrap()];
            receive_rest(&mut receiver, &mut received);
            for (ten, taken) in [1, 2].into_iter().zip(&taken) {
                let numbers = received.iter().map(|(number, _)| *number);
                let of: Vec<_> = numbers.filter(|number| number / 10 == ten).collect();
                assert_eq!(&of, taken, "what was taken arrives once and in order");
            }
            assert!(!received.is_empty(), "an empty ring takes one");
        });
    }

    #[test]
    fn runs_of_two_senders_do_not_mix() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let (sender, mut receiver) = mailbox(4);
            let start = |first| {
                let sender: Sender<Message> = sender.clone();
                let mut run = vec![message(first), message(first + 1)];
                thread::spawn(move || sender.send_many(&mut run))
            };
            let (one, two) = (start(10), start(20));
            let mut received = Vec::new();
            receiver.receive_many(&mut received, 4);
            assert_eq!((one.join().unwrap(), two.join().unwrap()), (2, 2));
            receive_rest(&mut receiver, &mut received);
            let numbers: Vec<_> = received.iter().map(|(number, _)| *number).collect();
            assert!(
                [[10, 11, 20, 21], [20, 21, 10, 11]].contains(&numbers[..].try_into().unwrap())
            );
        });
    }

    #[test]
    fn a_receiver_that_goes_while_messages_come_leaves_none_behind() {
        loom::model(|| {
            let (sender, mut receiver) = mailbox(2);
            let other = thread::spawn(move || {
                let sent = sender.send(message(1)).is_ok();
                // A mailbox that is closed stays closed.
                assert!(sender.send(message(2)).is_err() || sent);
            });
            drop(receiver.receive());
            drop(receiver);
            other.join().unwrap();
        });
    }

    #[test]
    fn a_receiver_that_goes_leaves_none_behind_although_senders_are_kept() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (sender, receiver) = mailbox(2);
            let token = Arc::new(());
            let start = |number| {
                let (sender, message): (Sender<Message>, _) =
                    (sender.clone(), (number, Arc::clone(&token)));
                // What is given back is dropped here.
                thread::spawn(move || drop(sender.send(message)))
            };
            let (one, two) = (start(1), start(2));
            drop(receiver);
            one.join().unwrap();
            two.join().unwrap();
            assert_eq!(Arc::strong_count(&token), 1, "a message lives as long as a sender");
            drop(sender);
        });
    }
}

mod handshake_models {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use super::handshake::Handshake;
    use super::ring::{Receiver, Sender, mailbox};
    use super::signal::Signal;
    use super::sync::{Barrier, Interrupt};

    /// A sleeper and its event descriptor.
    struct World {
        handshake: Handshake,
        event: Signal,
        announced: AtomicUsize,
        woken: AtomicUsize,
    }

    impl World {
        fn new(barrier: Barrier) -> Arc<Self> {
            Arc::new(Self {
                handshake: Handshake::new(barrier),
                event: Signal::default(),
                announced: AtomicUsize::new(0),
                woken: AtomicUsize::new(0),
            })
        }

        /// What a thread does that has something for the sleeper.
        fn send(&self, sender: &Sender<u32>) {
            sender.send(1).unwrap();
            if self.handshake.claim() {
                self.woken.fetch_add(1, Ordering::Relaxed);
                self.event.give();
            }
        }

        /// What the sleeper does until it has had `count` messages.
        fn sleep_and_receive(&self, receiver: &mut Receiver<u32>, count: usize) {
            let mut had = 0;
            while had < count {
                self.announced.fetch_add(1, Ordering::Relaxed);
                assert!(self.handshake.announce());
                if receiver.is_empty() {
                    self.event.wait();
                }
                self.handshake.withdraw();
                while receiver.receive().is_some() {
                    had += 1;
                }
            }
        }

        fn check_wakes(&self) {
            let count = |number: &AtomicUsize| number.load(Ordering::Relaxed);
            assert!(count(&self.woken) <= count(&self.announced), "one wake-up for a sleep");
        }
    }

    fn one_sender(barrier: &Barrier) {
        let world = World::new(barrier.clone());
        let (sender, mut receiver) = mailbox(1);
        let theirs = Arc::clone(&world);
        let barrier = barrier.clone();
        let other = thread::spawn(move || {
            if let Barrier::Expedited(interrupt) = &barrier {
                interrupt.may_come();
            }
            theirs.send(&sender);
            if let Barrier::Expedited(interrupt) = &barrier {
                interrupt.comes_at_last();
            }
        });
        world.sleep_and_receive(&mut receiver, 1);
        other.join().unwrap();
        world.check_wakes();
    }

    #[test]
    fn fences_on_both_sides_lose_no_wake_up() {
        loom::model(|| one_sender(&Barrier::Fences));
    }

    #[test]
    fn a_fence_that_the_sleeper_forces_on_the_sender_anywhere_loses_no_wake_up() {
        for place in 0..3 {
            loom::model(move || one_sender(&Barrier::Expedited(Interrupt::at(place))));
        }
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn without_a_barrier_the_checker_finds_a_wake_up_that_is_lost() {
        loom::model(|| one_sender(&Barrier::Missing));
    }

    #[test]
    fn two_senders_wake_one_sleeper() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let world = World::new(Barrier::Fences);
            let (sender, mut receiver) = mailbox(2);
            let start = || {
                let (world, sender) = (Arc::clone(&world), sender.clone());
                thread::spawn(move || world.send(&sender))
            };
            let others = [start(), start()];
            world.sleep_and_receive(&mut receiver, 2);
            others.into_iter().for_each(|other| other.join().unwrap());
            world.check_wakes();
        });
    }
}

mod doze_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::doze::Doze;
    use super::handshake::Handshake;
    use super::ring::{Receiver, Sender, mailbox};
    use super::signal::Signal;
    use super::sync::{Barrier, Interrupt};

    /// A sleeper, its event descriptor, and one that it sleeps for.
    struct World {
        handshake: Handshake,
        doze: Doze,
        event: Signal,
    }

    impl World {
        fn new(barrier: Barrier) -> Arc<Self> {
            let (handshake, doze) = (Handshake::new(barrier), Doze::default());
            Arc::new(Self { handshake, doze, event: Signal::default() })
        }

        /// What a thread does that has something for the one.
        fn send(&self, sender: &Sender<u32>) {
            sender.send(1).unwrap();
            if self.handshake.claim_for(&self.doze) {
                self.event.give();
            }
        }

        /// What the sleeper does until the one has had `count` messages: it lets it doze whenever it
        /// has none, and does not look at it before it was called.
        fn doze_and_receive(&self, receiver: &mut Receiver<u32>, count: usize) {
            let mut had = 0;
            while had < count {
                self.doze.begin();
                assert!(self.handshake.announce());
                if receiver.is_empty() {
                    self.sleep_until_it_is_rung_for();
                } else {
                    self.handshake.withdraw();
                }
                self.doze.end();
                while receiver.receive().is_some() {
                    had += 1;
                }
            }
        }

        /// It has announced.
        fn sleep_until_it_is_rung_for(&self) {
            loop {
                if !self.handshake.is_called() {
                    self.event.wait();
                }
                self.handshake.withdraw();
                if self.handshake.take_call() && self.doze.is_rung() {
                    return;
                }
                assert!(self.handshake.announce());
            }
        }
    }

    fn one_sender(barrier: &Barrier) {
        let world = World::new(barrier.clone());
        let (sender, mut receiver) = mailbox(1);
        let (theirs, barrier) = (Arc::clone(&world), barrier.clone());
        let other = thread::spawn(move || {
            if let Barrier::Expedited(interrupt) = &barrier {
                interrupt.may_come();
            }
            theirs.send(&sender);
            if let Barrier::Expedited(interrupt) = &barrier {
                interrupt.comes_at_last();
            }
        });
        world.doze_and_receive(&mut receiver, 1);
        other.join().unwrap();
    }

    #[test]
    fn with_fences_one_who_dozes_misses_nothing() {
        loom::model(|| one_sender(&Barrier::Fences));
    }

    #[test]
    fn with_a_fence_that_the_sleeper_forces_on_the_sender_anywhere_it_misses_nothing() {
        for place in 0..4 {
            loom::model(move || one_sender(&Barrier::Expedited(Interrupt::at(place))));
        }
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn without_a_barrier_the_checker_finds_a_call_that_is_lost() {
        loom::model(|| one_sender(&Barrier::Missing));
    }

    #[test]
    fn two_who_ring_at_once_for_one_who_dozes_are_both_heard() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let world = World::new(Barrier::Fences);
            let (sender, mut receiver) = mailbox(2);
            let start = || {
                let (world, sender) = (Arc::clone(&world), sender.clone());
                thread::spawn(move || world.send(&sender))
            };
            let others = [start(), start()];
            world.doze_and_receive(&mut receiver, 2);
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    #[test]
    fn one_who_dozes_again_and_again_hears_every_ring_of_one_who_rings_again() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let world = World::new(Barrier::Fences);
            let (sender, mut receiver) = mailbox(2);
            let theirs = Arc::clone(&world);
            let other = thread::spawn(move || {
                theirs.send(&sender);
                theirs.send(&sender);
            });
            world.doze_and_receive(&mut receiver, 2);
            other.join().unwrap();
        });
    }
}
