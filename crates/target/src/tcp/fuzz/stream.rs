//! A pipe between a peer and the service, and a medium that may answer late.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{
    Answers, Backend, Broken, Instant, Limits, Medium, Memory, Received, Request, Segment, Stream,
    Stretch, WakeSource,
};
use block::Ram;
use dma::Regions;

/// One direction of a pipe.
#[derive(Debug, Default)]
pub(super) struct Half {
    pub(super) bytes: Vec<u8>,
    pub(super) is_closed: bool,
}

/// One direction, as both ends have it.
#[derive(Clone, Debug, Default)]
pub(super) struct Way(Arc<Mutex<Half>>);

impl Way {
    pub(super) fn lock(&self) -> MutexGuard<'_, Half> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The service's end.
pub(super) struct Pipe {
    regions: Regions,
    pub(super) up: Way,
    pub(super) down: Way,
    inbox: Vec<u8>,
    sent: u64,
    /// Bytes that a receive brings at most.
    piece: usize,
    peer: String,
}

/// Bytes that wait for a peer at most.
const ROOM: usize = 48 << 10;
const INBOX: usize = 16 << 10;

impl Pipe {
    pub(super) fn new(regions: &Regions, piece: usize, peer: String) -> Self {
        let (up, down) = (Way::default(), Way::default());
        Self { regions: regions.clone(), up, down, inbox: Vec::new(), sent: 0, piece, peer }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.up.lock().is_closed = true;
        self.down.lock().is_closed = true;
    }
}

impl Stream for Pipe {
    fn receive(&mut self) -> Received {
        let mut half = self.up.lock();
        let count = half.bytes.len().min(self.piece).min(INBOX - self.inbox.len().min(INBOX));
        self.inbox.extend(half.bytes.drain(..count));
        match count {
            0 if half.is_closed && half.bytes.is_empty() => Received::End,
            0 => Received::Nothing,
            count => Received::Bytes(count),
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.inbox
    }

    fn consume(&mut self, count: usize) {
        self.inbox.drain(..count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> Received {
        let mut half = self.up.lock();
        let Some(first) = into.first() else { return Received::Nothing };
        let count = half.bytes.len().min(first.len_bytes as usize).min(self.piece);
        if count == 0 {
            return if half.is_closed { Received::End } else { Received::Nothing };
        }
        let bytes: Vec<u8> = half.bytes.drain(..count).collect();
        let place = Segment { len_bytes: u32::try_from(count).unwrap_or(0), ..*first };
        self.regions.store(place, &bytes).expect("a buffer lies in the budget's region");
        Received::Bytes(count)
    }

    fn send(&mut self, headers: &[u8], stretches: &[Stretch], _: bool) -> Result<usize, Broken> {
        let mut half = self.down.lock();
        if half.is_closed {
            return Err(Broken("the pipe is closed".to_owned()));
        }
        let mut bytes = Vec::new();
        for stretch in stretches {
            match *stretch {
                Stretch::Headers { at, len_bytes } => {
                    bytes.extend(&headers[at as usize..][..len_bytes as usize]);
                }
                Stretch::Memory(segment) => {
                    let mut part = vec![0; segment.len_bytes as usize];
                    self.regions.load(segment, &mut part).expect("a buffer lies in a region");
                    bytes.extend(part);
                }
            }
        }
        bytes.truncate(ROOM.saturating_sub(half.bytes.len()));
        self.sent += bytes.len() as u64;
        half.bytes.extend(&bytes);
        Ok(bytes.len())
    }

    fn released(&mut self) -> u64 {
        self.sent
    }

    fn shut_down(&mut self) {
        self.down.lock().is_closed = true;
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Nothing
    }

    fn arm(&mut self, _: bool, _: bool) -> bool {
        false
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }
}

/// Memory that answers nothing while it is stuck.
pub(super) struct Late {
    pub(super) ram: Arc<Ram>,
    pub(super) is_stuck: Arc<AtomicBool>,
}

struct LateChannel {
    channel: Box<dyn Backend>,
    is_stuck: Arc<AtomicBool>,
}

impl Medium for Late {
    fn limits(&self) -> Limits {
        self.ram.limits()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let (channel, is_stuck) = (self.ram.channel()?, Arc::clone(&self.is_stuck));
        Ok(Box::new(LateChannel { channel, is_stuck }))
    }
}

impl Backend for LateChannel {
    fn limits(&self) -> &Limits {
        self.channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.channel.submit(now, requests, segments)
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        if self.is_stuck.load(Ordering::Relaxed) { 0 } else { self.channel.poll(now, answers) }
    }
}
