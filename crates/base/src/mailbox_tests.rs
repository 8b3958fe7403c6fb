//! Tests of the mailbox: its contract, and all of its interleavings under a model checker (loom).
//!
//! The model compiles the shipped source; only the types of `sync` are the checker's. A receiver that
//! sleeps forever is a deadlock, which the checker reports.

#![allow(clippy::duplicate_mod, reason = "that is the point of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Mailbox, Wake};

#[path = "mailbox.rs"]
#[allow(dead_code, unreachable_pub, reason = "the model needs a part of it")]
mod mailbox;

/// `crate::sync` with the checker's types.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering};
    pub(super) use loom::sync::{Mutex, MutexGuard};
}

#[test]
fn messages_accumulate_until_received() {
    let mailbox = Mailbox::<Vec<u8>>::default();
    assert_eq!((mailbox.is_pending(), mailbox.take()), (false, None));
    mailbox.send(|list| list.push(1));
    mailbox.send(|list| list.push(2));
    assert_eq!((mailbox.is_pending(), mailbox.take()), (true, Some(vec![1, 2])));
    assert_eq!((mailbox.is_pending(), mailbox.take()), (false, None));
}

#[test]
fn locking_the_mailbox_sends_no_message() {
    let mailbox = Mailbox::new(0_u8);
    *mailbox.lock_contents() = 3;
    assert_eq!(mailbox.take(), None);
    mailbox.send(|value| *value += 1);
    assert_eq!(mailbox.receive(|value| *value), Some(4));
    assert_eq!(*mailbox.lock_contents(), 4);
}

#[test]
fn each_message_wakes_and_setting_a_waker_wakes_if_a_message_is_pending() {
    let mailbox = Mailbox::new(());
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let waker = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let is_woken = |expected: u32| assert_eq!(count.load(Ordering::Relaxed), expected);

    mailbox.set_waker(waker.clone());
    is_woken(0);
    mailbox.send(|()| {});
    is_woken(1);
    mailbox.set_waker(waker.clone());
    is_woken(2);
    mailbox.take();
    mailbox.set_waker(waker);
    is_woken(2);
}

#[test]
fn waker_may_lock_the_mailbox() {
    let mailbox = Arc::new(Mailbox::<u32>::default());
    let (weak, received) = (Arc::downgrade(&mailbox), Arc::new(AtomicU32::new(0)));
    let sum = Arc::clone(&received);
    mailbox.set_waker(Arc::new(move || {
        let mailbox = weak.upgrade().unwrap();
        sum.fetch_add(mailbox.take().unwrap_or(0), Ordering::Relaxed);
        mailbox.set_waker(Arc::new(()));
    }));
    mailbox.send(|value| *value = 5);
    assert_eq!(received.load(Ordering::Relaxed), 5);
}

/// Waker of a thread that announces its sleep, as the wakers of reactors do.
struct SleepingReceiver {
    is_asleep: loom::sync::atomic::AtomicBool,
    wake_up: loom::sync::Notify,
}

impl SleepingReceiver {
    fn new() -> Self {
        let is_asleep = loom::sync::atomic::AtomicBool::new(false);
        Self { is_asleep, wake_up: loom::sync::Notify::new() }
    }

    /// Sleeps unless `has_work` after the announcement.
    fn sleep(&self, has_work: impl FnOnce() -> bool) {
        self.is_asleep.store(true, Ordering::Relaxed);
        loom::sync::atomic::fence(Ordering::SeqCst);
        if !has_work() {
            self.wake_up.wait();
        }
        self.is_asleep.store(false, Ordering::Relaxed);
    }
}

impl Wake for SleepingReceiver {
    fn wake(&self) {
        loom::sync::atomic::fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) {
            self.wake_up.notify();
        }
    }
}

/// `senders` threads send one message each; the receiver sleeps until it has all of them.
fn check_all_messages_are_received(senders: u32, sets_waker_late: bool) {
    let mailbox = Arc::new(mailbox::Mailbox::<Vec<u32>>::default());
    let sleeper = Arc::new(SleepingReceiver::new());
    if !sets_waker_late {
        mailbox.set_waker(Arc::clone(&sleeper) as mailbox::SharedWaker);
    }
    for number in 0..senders {
        let mailbox = Arc::clone(&mailbox);
        loom::thread::spawn(move || mailbox.send(|list| list.push(number)));
    }
    if sets_waker_late {
        mailbox.set_waker(Arc::clone(&sleeper) as mailbox::SharedWaker);
    }
    let mut received = Vec::new();
    while received.len() < senders as usize {
        received.extend(mailbox.take().unwrap_or_default());
        if received.len() < senders as usize {
            sleeper.sleep(|| mailbox.is_pending());
        }
    }
    received.sort_unstable();
    assert!(received.into_iter().eq(0..senders));
}

/// What the sender stored before a message is visible to the receiver that finds it pending, before it
/// takes the lock.
fn check_stores_before_send_are_visible() {
    let mailbox = Arc::new(mailbox::Mailbox::new(()));
    let stored = Arc::new(loom::sync::atomic::AtomicBool::new(false));
    let (sender, before) = (Arc::clone(&mailbox), Arc::clone(&stored));
    loom::thread::spawn(move || {
        before.store(true, Ordering::Relaxed);
        sender.send(|()| {});
    });
    if mailbox.is_pending() {
        assert!(stored.load(Ordering::Relaxed));
    }
}

#[test]
fn every_interleaving_delivers_every_message() {
    loom::model(|| check_all_messages_are_received(1, false));
    loom::model(|| check_all_messages_are_received(1, true));
    let mut two = loom::model::Builder::new();
    two.preemption_bound = Some(3);
    two.check(|| check_all_messages_are_received(2, false));
    loom::model(check_stores_before_send_are_visible);
}
