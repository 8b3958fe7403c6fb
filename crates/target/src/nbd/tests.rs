//! Both ends in this process: a small client, and the server without a socket or with one.

pub(super) mod client;
mod hostile;
mod server;
mod session;

use std::sync::Arc;

use base::{Answers, Backend, Durability, Instant, Limits, Medium, Memory, Segment};
use block::Ram;
use dma::{Mapping, Regions};
use wire::nbd::ErrorCode;

use super::memory::MEMORY_BYTES;
use super::pool::{POOL_BYTES, Pool};
use super::survey::survey;
use super::{About, Connection, Export};

/// A connection and the backend it works with, between which this moves everything.
struct Session {
    connection: Connection,
    backend: Box<dyn Backend>,
    medium: Ram,
    export: Arc<Export>,
    regions: Regions,
    answers: Answers,
}

/// Bytes in a block of the medium.
const BLOCK: u32 = 512;
/// Bytes on it.
const SIZE: u64 = 64 << 20;

impl Session {
    fn new() -> Self {
        Self::with(false, |_| {})
    }

    fn with(is_read_only: bool, change: impl FnOnce(&mut Limits)) -> Self {
        Self::of(is_read_only, false, change)
    }

    /// One in which the client may change the size.
    fn resizable() -> Self {
        Self::of(false, true, |_| {})
    }

    fn of(is_read_only: bool, lets_resize: bool, change: impl FnOnce(&mut Limits)) -> Self {
        let regions = Regions::new(4);
        let medium = Ram::new(&regions, BLOCK, SIZE / u64::from(BLOCK)).unwrap();
        let memory = Mapping::with_small_pages(MEMORY_BYTES as usize).unwrap();
        let memory = regions.add(memory).unwrap();
        let pool = Arc::new(Pool::new(&regions, POOL_BYTES).unwrap());
        // It forgets everything, which is no reason not to try what is for those that do not.
        let mut limits = Limits { durability: Durability::VolatileCache, ..medium.limits() };
        change(&mut limits);
        let export = Export::new("disk", "a disk", limits, is_read_only).unwrap();
        let export = Arc::new(if lets_resize { export.with_resize() } else { export });
        Self {
            connection: Connection::new(Arc::clone(&export), regions.clone(), memory, pool),
            backend: medium.channel().unwrap(),
            medium,
            export,
            regions,
            answers: Answers::with_capacity(7),
        }
    }

    /// Gives the connection as many bytes as it takes, and says how many that were.
    fn give(&mut self, bytes: &[u8]) -> usize {
        let mut left = bytes;
        for segment in self.connection.receive_into() {
            let count = left.len().min(segment.len_bytes as usize);
            let (part, rest) = left.split_at(count);
            let to = Segment { len_bytes: u32::try_from(count).unwrap(), ..*segment };
            self.regions.store(to, part).unwrap();
            left = rest;
        }
        let count = bytes.len() - left.len();
        self.connection.received(count);
        count
    }

    /// Takes what the connection wants to send, but no more than `most` bytes.
    fn take(&mut self, most: usize) -> Vec<u8> {
        let mut taken = Vec::new();
        for segment in self.connection.to_send() {
            let count = (most - taken.len()).min(segment.len_bytes as usize);
            let begin = taken.len();
            taken.resize(begin + count, 0);
            let from = Segment { len_bytes: u32::try_from(count).unwrap(), ..*segment };
            self.regions.load(from, &mut taken[begin..]).unwrap();
        }
        self.connection.sent(taken.len());
        taken
    }

    /// Does what there is to do but for moving bytes. Whether there was something.
    fn work(&mut self) -> bool {
        let now = Instant::default();
        let mut count = self.connection.step();
        let (requests, segments) = self.connection.requests();
        let taken = self.backend.submit(now, requests, segments);
        self.connection.taken(taken);
        count += taken;
        count += self.backend.poll(now, &mut self.answers);
        self.answers.drain().for_each(|answer| self.connection.answer(answer));
        while let Some(question) = self.connection.next_question() {
            match question.about {
                About::Size { bytes } => {
                    let done = if bytes > SIZE { Err(ErrorCode::ENOSPC) } else { Ok(()) };
                    self.export.resize(bytes.min(SIZE) / u64::from(BLOCK));
                    self.connection.resized(question.slot, done);
                }
                about => {
                    let extents = survey(&self.medium, about);
                    self.connection.surveyed(question.slot, &extents);
                }
            }
            count += 1;
        }
        count > 0
    }

    /// Gives all of `bytes` in pieces of `piece`, and takes all that comes back.
    fn talk(&mut self, bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut left, mut back) = (bytes, Vec::new());
        loop {
            let given = self.give(&left[..piece.min(left.len())]);
            left = &left[given..];
            let mut worked = given > 0;
            while self.work() || !self.connection.to_send().is_empty() {
                back.extend(self.take(usize::MAX));
                worked = true;
            }
            if !worked {
                assert!(left.is_empty() || self.connection.is_ending(), "it takes no more");
                return back;
            }
        }
    }
}
