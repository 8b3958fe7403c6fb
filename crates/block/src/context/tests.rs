//! An inbox between two real threads; `model` covers every interleaving.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{CompletionBatch, IoCompletion, IoStatus};
use tenmil_linux::named_thread::{NamedThread, yield_cpu};

use super::inbox::CompletionInbox;

fn sample_completion(number: u64) -> IoCompletion {
    let status = IoStatus(u16::try_from(number % 0x4000).unwrap());
    IoCompletion { token: number % 8, status, result: u32::try_from(number).unwrap() }
}

#[test]
fn inbox_delivers_completions_between_threads_in_order() {
    const COUNT: u64 = 100_000;
    let inbox = Arc::new(CompletionInbox::new(5));
    let taken = Arc::new(AtomicU64::new(0));
    let (theirs, read) = (Arc::clone(&inbox), Arc::clone(&taken));
    let writer = NamedThread::spawn("writer", None, move |_: &_| {
        for number in 0..COUNT {
            // In place of the tags: never more messages than entries.
            while number - read.load(Ordering::Acquire) >= 8 {
                yield_cpu();
            }
            theirs.push_completions(sample_completion(number));
        }
    });
    let (mut tail, mut completions) = (0, CompletionBatch::with_capacity(3));
    while tail < COUNT {
        let before = tail;
        if inbox.take_completions(&mut tail, &mut completions) == 0 {
            yield_cpu();
        }
        for (number, found) in (before..).zip(completions.drain()) {
            assert_eq!(found, sample_completion(number));
        }
        taken.store(tail, Ordering::Release);
    }
    writer.unwrap().join();
    assert!(!inbox.has_more(tail));
}
