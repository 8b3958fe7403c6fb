//! The mailbox ring, the biased lock and the sleep/wake-up protocol under a model checker (loom), in every order
//! that the memory model permits.
//!
//! The two source files are the shipped ones; only the primitives of `sync` are the checker's types
//! here. A thread that waits forever is a deadlock, which the checker reports; so is a message that
//! is never dropped.

#![allow(clippy::duplicate_mod, reason = "that is the point of it")]

#[path = "biased_lock.rs"]
mod biased_lock;
#[path = "mailbox/mailbox_ring.rs"]
#[allow(dead_code, unreachable_pub, reason = "the models need a part of it")]
mod mailbox_ring;
#[path = "wakeup/park_flag.rs"]
#[allow(unreachable_pub, reason = "the crate exports it, the models do not")]
mod park_flag;
#[path = "wakeup/sleep_flag.rs"]
mod sleep_flag;

/// `crate::sync` with the checker's types.
mod sync {
    pub(crate) use loom::cell::UnsafeCell;
    use loom::sync::atomic::fence;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
    pub(crate) use loom::sync::{Arc, Mutex};
    pub(crate) use loom::thread::yield_now as yield_cpu;
    pub(crate) use std::sync::PoisonError;

    pub(crate) use super::interrupt::Interrupt;

    /// Model of `crate::barrier`, as far as it is observable.
    #[derive(Clone, Debug)]
    pub(crate) enum AsymmetricBarrier {
        /// `membarrier(2)`: a full fence in the sleeper, and one at some point of the other thread.
        Expedited(Interrupt),
        Fences,
        /// No barrier: proves that the checker detects its absence.
        Missing,
    }

    impl AsymmetricBarrier {
        pub(crate) fn notifier_barrier(&self) {
            match self {
                Self::Expedited(interrupt) => interrupt.assert_reachable(),
                Self::Fences => fence(Ordering::SeqCst),
                Self::Missing => {}
            }
        }

        pub(crate) fn sleeper_barrier(&self) -> bool {
            match self {
                Self::Expedited(interrupt) => interrupt.send(),
                Self::Fences => fence(Ordering::SeqCst),
                Self::Missing => {}
            }
            true
        }
    }
}

/// Interrupt by which the kernel makes another CPU execute a full fence.
mod interrupt {
    use std::sync::atomic::AtomicUsize;

    use loom::sync::Arc;
    use loom::sync::atomic::{Ordering, fence};

    use super::signal::Signal;

    /// Delivered at one of the points that the interrupted thread passes; the sender waits for its
    /// delivery.
    #[derive(Clone, Debug)]
    pub(crate) struct Interrupt {
        place: usize,
        /// Points passed by the interrupted thread. Accessed by that thread only.
        passed: Arc<AtomicUsize>,
        sent: Arc<Signal>,
        came: Arc<Signal>,
    }

    impl Interrupt {
        /// Interrupt delivered at the point with this number, from 0.
        pub(crate) fn fence_at(place: usize) -> Self {
            let passed = Arc::new(AtomicUsize::new(0));
            Self { place, passed, sent: Arc::default(), came: Arc::default() }
        }

        /// The interrupted thread passes a point.
        pub(crate) fn assert_reachable(&self) {
            if self.passed.fetch_add(1, Ordering::Relaxed) == self.place {
                self.new_message();
            }
        }

        /// The interrupted thread passes its last point: the interrupt is delivered now at the
        /// latest.
        pub(crate) fn assert_always_reached(&self) {
            if self.passed.load(Ordering::Relaxed) <= self.place {
                self.new_message();
            }
        }

        fn new_message(&self) {
            self.sent.wait();
            fence(Ordering::SeqCst);
            self.came.send_one();
        }

        pub(crate) fn send(&self) {
            fence(Ordering::SeqCst);
            self.sent.send_one();
            self.came.wait();
            fence(Ordering::SeqCst);
        }
    }
}

/// Model of an eventfd: a write before a wait ends the wait.
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
        pub(super) fn send_one(&self) {
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

mod lock_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::biased_lock::{BiasedLock, ThreadFlag};
    use super::sync::AsymmetricBarrier;

    /// The checker reports a value that two threads access at once.
    fn check(threads: u32, accesses: u32, barrier: AsymmetricBarrier) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let lock = Arc::new(BiasedLock::new(0, barrier.clone()));
            let add = move |lock: &BiasedLock<u32>| {
                let flag = ThreadFlag::leaked();
                for _ in 0..accesses {
                    lock.access(flag, |value| *value += 1);
                }
            };
            let start = |_| {
                let lock = Arc::clone(&lock);
                thread::spawn(move || add(&lock))
            };
            let others: Vec<_> = (1..threads).map(start).collect();
            add(&lock);
            others.into_iter().for_each(|one| one.join().unwrap());
            lock.access(ThreadFlag::leaked(), |value| assert_eq!(*value, threads * accesses));
        });
    }

    #[test]
    fn two_threads_alternate_in_any_order() {
        check(2, 2, AsymmetricBarrier::Fences);
    }

    #[test]
    fn three_threads_take_over_from_each_other() {
        check(3, 1, AsymmetricBarrier::Fences);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn missing_barrier_is_detected_in_the_biased_lock() {
        check(2, 2, AsymmetricBarrier::Missing);
    }
}

mod ring_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::mailbox_ring::{Receiver, Sender, mailbox};

    /// Message whose drop and whose bytes the checker tracks.
    type Message = (u32, Arc<()>);

    fn message(number: u32) -> Message {
        (number, Arc::new(()))
    }

    /// Sends in order, and retries while the ring is full.
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
    fn two_senders_lose_and_duplicate_nothing() {
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
    fn full_ring_rejects_and_reuses_slots_in_order() {
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
    fn two_senders_share_a_full_wrapping_ring() {
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
    fn batches_of_two_senders_do_not_interleave() {
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
    fn dropped_receiver_during_sends_leaks_no_message() {
        loom::model(|| {
            let (sender, mut receiver) = mailbox(2);
            let other = thread::spawn(move || {
                let sent = sender.send(message(1)).is_ok();
                // A closed mailbox stays closed.
                assert!(sender.send(message(2)).is_err() || sent);
            });
            drop(receiver.receive());
            drop(receiver);
            other.join().unwrap();
        });
    }

    #[test]
    fn dropped_receiver_leaks_no_message_although_senders_remain() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (sender, receiver) = mailbox(2);
            let token = Arc::new(());
            let start = |number| {
                let (sender, message): (Sender<Message>, _) =
                    (sender.clone(), (number, Arc::clone(&token)));
                // A returned message is dropped here.
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

    use super::mailbox_ring::{Receiver, Sender, mailbox};
    use super::signal::Signal;
    use super::sleep_flag::SleepFlag;
    use super::sync::{AsymmetricBarrier, Interrupt};

    /// A sleeper and its eventfd.
    struct World {
        handshake: SleepFlag,
        event: Signal,
        announced: AtomicUsize,
        woken: AtomicUsize,
    }

    impl World {
        fn new(barrier: AsymmetricBarrier) -> Arc<Self> {
            Arc::new(Self {
                handshake: SleepFlag::new(barrier),
                event: Signal::default(),
                announced: AtomicUsize::new(0),
                woken: AtomicUsize::new(0),
            })
        }

        /// Notifier thread.
        fn send(&self, sender: &Sender<u32>) {
            sender.send(1).unwrap();
            if self.handshake.claim_wakeup() {
                self.woken.fetch_add(1, Ordering::Relaxed);
                self.event.send_one();
            }
        }

        /// Sleeper thread, until it has received `count` messages.
        fn sleep_and_receive(&self, receiver: &mut Receiver<u32>, count: usize) {
            let mut had = 0;
            while had < count {
                self.announced.fetch_add(1, Ordering::Relaxed);
                assert!(self.handshake.announce());
                if receiver.is_empty() {
                    self.event.wait();
                }
                self.handshake.cancel();
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

    fn one_sender(barrier: &AsymmetricBarrier) {
        let world = World::new(barrier.clone());
        let (sender, mut receiver) = mailbox(1);
        let theirs = Arc::clone(&world);
        let barrier = barrier.clone();
        let other = thread::spawn(move || {
            if let AsymmetricBarrier::Expedited(interrupt) = &barrier {
                interrupt.assert_reachable();
            }
            theirs.send(&sender);
            if let AsymmetricBarrier::Expedited(interrupt) = &barrier {
                interrupt.assert_always_reached();
            }
        });
        world.sleep_and_receive(&mut receiver, 1);
        other.join().unwrap();
        world.check_wakes();
    }

    #[test]
    fn fences_on_both_sides_lose_no_wakeup() {
        loom::model(|| one_sender(&AsymmetricBarrier::Fences));
    }

    #[test]
    fn membarrier_at_any_point_of_the_sender_loses_no_wakeup() {
        for place in 0..3 {
            loom::model(move || {
                one_sender(&AsymmetricBarrier::Expedited(Interrupt::fence_at(place)))
            });
        }
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn missing_barrier_is_found_as_a_lost_wakeup() {
        loom::model(|| one_sender(&AsymmetricBarrier::Missing));
    }

    #[test]
    fn two_senders_wake_one_sleeper() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let world = World::new(AsymmetricBarrier::Fences);
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

    use super::mailbox_ring::{Receiver, Sender, mailbox};
    use super::park_flag::ParkFlag;
    use super::signal::Signal;
    use super::sleep_flag::SleepFlag;
    use super::sync::{AsymmetricBarrier, Interrupt};

    /// A sleeper, its eventfd, and one light thread that may park.
    struct World {
        handshake: SleepFlag,
        doze: ParkFlag,
        event: Signal,
    }

    impl World {
        fn new(barrier: AsymmetricBarrier) -> Arc<Self> {
            let (handshake, doze) = (SleepFlag::new(barrier), ParkFlag::default());
            Arc::new(Self { handshake, doze, event: Signal::default() })
        }

        /// Notifier thread, for the light thread.
        fn send(&self, sender: &Sender<u32>) {
            sender.send(1).unwrap();
            if self.handshake.notify_parked_and_claim_wakeup(&self.doze) {
                self.event.send_one();
            }
        }

        /// Sleeper thread, until the light thread has received `count` messages: it parks the
        /// thread whenever it has none, and does not poll it before it is notified.
        fn park_and_receive(&self, receiver: &mut Receiver<u32>, count: usize) {
            let mut had = 0;
            while had < count {
                self.doze.mark_parked();
                assert!(self.handshake.announce());
                if receiver.is_empty() {
                    self.sleep_until_notified();
                } else {
                    self.handshake.cancel();
                }
                self.doze.mark_runnable();
                while receiver.receive().is_some() {
                    had += 1;
                }
            }
        }

        /// The sleep has been announced.
        fn sleep_until_notified(&self) {
            loop {
                if !self.handshake.has_notified_parked_thread() {
                    self.event.wait();
                }
                self.handshake.cancel();
                if self.handshake.clear_notified_parked_thread() && self.doze.is_notified() {
                    return;
                }
                assert!(self.handshake.announce());
            }
        }
    }

    fn one_sender(barrier: &AsymmetricBarrier) {
        let world = World::new(barrier.clone());
        let (sender, mut receiver) = mailbox(1);
        let (theirs, barrier) = (Arc::clone(&world), barrier.clone());
        let other = thread::spawn(move || {
            if let AsymmetricBarrier::Expedited(interrupt) = &barrier {
                interrupt.assert_reachable();
            }
            theirs.send(&sender);
            if let AsymmetricBarrier::Expedited(interrupt) = &barrier {
                interrupt.assert_always_reached();
            }
        });
        world.park_and_receive(&mut receiver, 1);
        other.join().unwrap();
    }

    #[test]
    fn fences_lose_no_notification_of_a_parked_thread() {
        loom::model(|| one_sender(&AsymmetricBarrier::Fences));
    }

    #[test]
    fn membarrier_loses_no_notification_of_a_parked_thread() {
        for place in 0..4 {
            loom::model(move || {
                one_sender(&AsymmetricBarrier::Expedited(Interrupt::fence_at(place)))
            });
        }
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn missing_barrier_is_found_as_a_lost_park_notification() {
        loom::model(|| one_sender(&AsymmetricBarrier::Missing));
    }

    #[test]
    fn two_notifications_of_one_parked_thread_both_arrive() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let world = World::new(AsymmetricBarrier::Fences);
            let (sender, mut receiver) = mailbox(2);
            let start = || {
                let (world, sender) = (Arc::clone(&world), sender.clone());
                thread::spawn(move || world.send(&sender))
            };
            let others = [start(), start()];
            world.park_and_receive(&mut receiver, 2);
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    #[test]
    fn repeated_parking_receives_every_notification() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let world = World::new(AsymmetricBarrier::Fences);
            let (sender, mut receiver) = mailbox(2);
            let theirs = Arc::clone(&world);
            let other = thread::spawn(move || {
                theirs.send(&sender);
                theirs.send(&sender);
            });
            world.park_and_receive(&mut receiver, 2);
            other.join().unwrap();
        });
    }
}
