//! Bounded multi-producer, single-consumer mailboxes that never block.
//!
//! A message of 24 bytes costs half a cache line, and two polling threads exchange it at the cost
//! of moving that line. Messages of one sender arrive in order. A full mailbox returns the message.
//! A sender that is preempted in the middle of a send delays later messages until it resumes; only
//! a receiver that is being dropped spins for it, so that no message is left behind.
//!
//! Sending does not wake the receiver. A sender notifies the [`Notifier`](crate::Notifier) of a
//! receiver that may be asleep, after the last message of a batch.

mod mailbox_ring;

use crate::sync;

pub use mailbox_ring::{Receiver, Sender, mailbox};

const _: () = assert!(Sender::<[u64; 3]>::SLOT_BYTES == 32, "two messages of 24 bytes to a line");

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use tenmil_base::Random;

    use super::{Receiver, Sender, mailbox};
    use crate::named_thread::{NamedThread, yield_cpu};

    #[test]
    fn message_arrives_once() {
        let (sender, mut receiver) = mailbox(4);
        assert!(receiver.is_empty());
        sender.send("hello").unwrap();
        assert!(!receiver.is_empty());
        assert_eq!(receiver.receive(), Some("hello"));
        assert_eq!(receiver.receive(), None);
        assert!(receiver.is_empty());
    }

    #[test]
    fn full_mailbox_returns_the_message() {
        let (sender, mut receiver) = mailbox(4);
        for number in 0..4 {
            assert_eq!(sender.send(number), Ok(()));
        }
        assert_eq!(sender.send(4), Err(4));
        assert_eq!(receiver.receive(), Some(0));
        assert_eq!(sender.send(4), Ok(()), "one slot is free again");
        assert_eq!(sender.send(5), Err(5));
    }

    #[test]
    fn capacity_is_at_least_as_requested() {
        for (asked, room) in [(0, 1), (1, 1), (2, 2), (5, 8), (8, 8)] {
            let (sender, receiver) = mailbox(asked);
            let taken = (0..100).take_while(|number| sender.send(*number).is_ok()).count();
            assert_eq!((taken, receiver.capacity()), (room, room));
        }
    }

    #[test]
    fn messages_that_do_not_fit_stay_with_the_sender_in_order() {
        let (sender, mut receiver) = mailbox(4);
        sender.send(0).unwrap();
        let mut unsent = vec![1, 2, 3, 4, 5];
        assert_eq!(sender.send_many(&mut unsent), 3);
        assert_eq!(unsent, [4, 5]);
        assert_eq!(sender.send_many(&mut unsent), 0);
        let mut received = vec![9];
        assert_eq!(receiver.receive_many(&mut received, 2), 2);
        assert_eq!(received, [9, 0, 1], "appended, and no more than asked for");
        assert_eq!(sender.send_many(&mut unsent), 2);
        assert!(unsent.is_empty());
        assert_eq!(receiver.receive_many(&mut received, usize::MAX), 4);
        assert_eq!(received, [9, 0, 1, 2, 3, 4, 5]);
        assert_eq!(sender.send_many(&mut Vec::new()), 0);
    }

    #[test]
    fn mailbox_matches_a_queue_model_however_often_it_wraps() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let (sender, mut receiver) = mailbox(1 << random.below(4));
            let mut queue = VecDeque::new();
            let mut next = 0_u64;
            for _ in 0..2_000 {
                let mut some = (next..next + random.below(6)).collect::<Vec<_>>();
                let sent = if random.chance(1, 2) {
                    sender.send_many(&mut some)
                } else {
                    some.into_iter().take_while(|number| sender.send(*number).is_ok()).count()
                };
                queue.extend(next..next + sent as u64);
                next += sent as u64;
                assert!(queue.len() <= receiver.capacity(), "seed {seed}");

                let max = usize::try_from(random.below(6)).unwrap();
                let mut received = Vec::new();
                assert_eq!(receiver.receive_many(&mut received, max), max.min(queue.len()));
                assert!(queue.drain(..received.len()).eq(received), "seed {seed}");
                assert_eq!(receiver.receive(), queue.pop_front(), "seed {seed}");
                assert_eq!(receiver.is_empty(), queue.is_empty(), "seed {seed}");
            }
        }
    }

    #[test]
    fn unreceived_messages_are_dropped_once() {
        let counted = Arc::new(());
        let fill = |sender: &Sender<_>| {
            for _ in 0..3 {
                sender.send(Arc::clone(&counted)).unwrap();
            }
        };
        let (sender, receiver) = mailbox(4);
        fill(&sender);
        drop(receiver);
        assert_eq!(Arc::strong_count(&counted), 1, "the receiver took them along");
        assert!(sender.send(Arc::clone(&counted)).is_err());

        let (sender, mut receiver) = mailbox(4);
        fill(&sender);
        drop(sender);
        drop(receiver.receive());
        assert_eq!(Arc::strong_count(&counted), 3, "what was sent outlives its sender");
        drop(receiver);
        assert_eq!(Arc::strong_count(&counted), 1);
    }

    #[test]
    fn message_that_panics_in_drop_affects_no_other() {
        struct Counted<'a>(u32, &'a AtomicU32);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.1.fetch_add(1, Ordering::Relaxed);
                assert_ne!(self.0, 2, "on purpose");
            }
        }
        let dropped = AtomicU32::new(0);
        let (sender, receiver) = mailbox(8);
        for number in 0..6 {
            assert!(sender.send(Counted(number, &dropped)).is_ok());
        }
        assert!(catch_unwind(AssertUnwindSafe(|| drop(receiver))).is_err());
        drop(sender);
        assert_eq!(dropped.into_inner(), 6);
    }

    #[test]
    fn mailbox_without_receiver_is_closed() {
        let (sender, receiver) = mailbox(2);
        let other = sender.clone();
        assert!(!other.is_closed());
        drop(receiver);
        assert!(sender.is_closed() && other.is_closed());
        assert_eq!(sender.send(1), Err(1));
        let mut unsent = vec![1, 2];
        assert_eq!(other.send_many(&mut unsent), 0);
        assert_eq!(unsent, [1, 2]);
    }

    /// Sends `count` numbers tagged with the sender's number, one by one and in batches.
    fn send_numbers(sender: &Sender<[u64; 3]>, lane: u64, count: u64) {
        let mut random = Random::new(lane);
        let mut next = 0;
        let mut run = Vec::new();
        while next < count || !run.is_empty() {
            if run.is_empty() {
                let end = count.min(next + 1 + random.below(40));
                run.extend((next..end).map(|number| [lane, number, !number]));
                next = end;
            }
            let sent = if run.len() == 1 {
                sender.send(run[0]).is_ok() && run.pop().is_some()
            } else {
                sender.send_many(&mut run) > 0
            };
            if !sent {
                yield_cpu();
            }
        }
    }

    fn receive_numbers(receiver: &mut Receiver<[u64; 3]>, lanes: u64, count: u64) {
        let mut next = vec![0; usize::try_from(lanes).unwrap()];
        let mut batch = Vec::new();
        let mut random = Random::new(99);
        while next.iter().any(|number| *number < count) {
            let max = usize::try_from(1 + random.below(64)).unwrap();
            if receiver.receive_many(&mut batch, max) == 0 {
                yield_cpu();
            }
            for [lane, number, inverse] in batch.drain(..) {
                let expected = &mut next[usize::try_from(lane).unwrap()];
                assert_eq!((number, inverse), (*expected, !*expected), "from sender {lane}");
                *expected += 1;
            }
        }
    }

    #[test]
    fn messages_of_four_threads_arrive_in_order_per_sender() {
        let count = if cfg!(miri) { 200 } else { 250_000 };
        for capacity in [2, 256] {
            let (sender, mut receiver) = mailbox(capacity);
            let start = |lane| {
                let sender = sender.clone();
                let body = move |_: &_| send_numbers(&sender, lane, count);
                NamedThread::spawn(&format!("sender-{lane}"), None, body).unwrap()
            };
            let senders: Vec<_> = (0..4).map(start).collect();
            receive_numbers(&mut receiver, 4, count);
            senders.into_iter().for_each(NamedThread::join);
            assert!(receiver.is_empty());
        }
    }
}
