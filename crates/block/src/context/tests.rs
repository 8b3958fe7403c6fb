//! An inbox between two threads as they are; `model` has them in every order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{Answer, Answers, Outcome};
use host::thread::{Thread, give_way};

use super::inbox::Inbox;

fn answer(number: u64) -> Answer {
    let outcome = Outcome(u16::try_from(number % 0x4000).unwrap());
    Answer { token: number % 8, outcome, result: u32::try_from(number).unwrap() }
}

#[test]
fn one_thread_reads_what_another_puts_in_whole_and_in_order() {
    const COUNT: u64 = 100_000;
    let inbox = Arc::new(Inbox::new(5));
    let taken = Arc::new(AtomicU64::new(0));
    let (theirs, read) = (Arc::clone(&inbox), Arc::clone(&taken));
    let writer = Thread::spawn("writer", None, move |_: &_| {
        for number in 0..COUNT {
            // What stands for the tags: never more than there are places.
            while number - read.load(Ordering::Acquire) >= 8 {
                give_way();
            }
            theirs.put(answer(number));
        }
    });
    let (mut tail, mut answers) = (0, Answers::with_capacity(3));
    while tail < COUNT {
        let before = tail;
        if inbox.take(&mut tail, &mut answers) == 0 {
            give_way();
        }
        for (number, found) in (before..).zip(answers.drain()) {
            assert_eq!(found, answer(number));
        }
        taken.store(tail, Ordering::Release);
    }
    writer.unwrap().join();
    assert!(!inbox.has_more(tail));
}
