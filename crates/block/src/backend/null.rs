//! The medium without a medium: every request is answered, and no data moves.

use std::sync::Arc;

use base::{
    Answer, Answers, Backend, Durability, Instant, Limits, Medium, Operation, Outcome, Request,
    Segment, Support, WakeSource,
};

use super::range::SEGMENTS_MAX;
use super::ready::Ready;
use crate::MediumError;
use crate::open::{BLOCK_DEFAULT, Opened, Opener, block_count};
use crate::uri::Uri;

/// Blocks that are not there. A read leaves the memory as it was, a write is forgotten, a compare
/// finds no difference; only the range of blocks is checked. What is left is the cost of everything
/// around the medium.
#[derive(Clone, Debug)]
pub struct Null {
    limits: Limits,
}

#[derive(Debug)]
struct NullChannel {
    limits: Limits,
    /// The answer to a request that came alone when nothing was ready: it has the first place. Token
    /// and outcome are loaded as they were stored; out of a queue an answer is loaded as a whole,
    /// and that waits until the stores of its parts are done.
    alone: Option<(u64, Outcome)>,
    ready: Ready,
}

const DEPTH_MAX: u32 = 4096;
/// Bytes in the largest request: what an emulated SSD with a transfer limit of 1 MiB asks for.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Bytes on a medium that nobody gave a size.
const SIZE_DEFAULT: u64 = 1 << 40;

/// Opens `null:?size=1t&block=512`.
pub(crate) fn open(_: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    if !uri.path().is_empty() {
        let problem = format!("path is `{}`, expected none: null:?size=1t", uri.path());
        return Err(uri.refuse(problem).into());
    }
    let mut fields = uri.fields();
    let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
    let size_bytes = fields.size("size")?.unwrap_or(SIZE_DEFAULT);
    fields.finish()?;
    let null = Null::new(block_size, block_count(uri, size_bytes, block_size)?)?;
    Ok(Opened::fresh(Arc::new(null), "null: no data moves"))
}

impl Null {
    /// `block_count` blocks of `block_size` bytes.
    ///
    /// # Errors
    ///
    /// If the block size is not a power of two from 512 to 65536, or there are no blocks.
    pub fn new(block_size: u32, block_count: u64) -> Result<Self, MediumError> {
        super::range::check_geometry("null", block_size, block_count)?;
        Ok(Self {
            limits: Limits {
                block_size,
                metadata_size: 0,
                block_count,
                request_blocks_max: REQUEST_BYTES_MAX / block_size,
                segments_max: SEGMENTS_MAX,
                optimal_boundary_blocks: 0,
                atomic_write_blocks: 1,
                depth_max: DEPTH_MAX,
                durability: Durability::None,
                support: Support::of(&Operation::ALL),
            },
        })
    }
}

impl Medium for Null {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let ready = Ready::with_depth(self.limits.depth_max);
        Ok(Box::new(NullChannel { limits: self.limits.clone(), alone: None, ready }))
    }
}

impl NullChannel {
    fn has_answers(&self) -> bool {
        self.alone.is_some() || self.ready.len() > 0
    }

    /// Not inlined: what comes alone does not pay for the loop.
    #[inline(never)]
    fn submit_batch(&mut self, requests: &[Request]) -> usize {
        let waiting = usize::from(self.alone.is_some());
        let count = requests.len().min(self.ready.room() - waiting);
        let block_count = self.limits.block_count;
        self.ready.extend(requests[..count].iter().map(|request| Answer {
            token: request.token,
            outcome: outcome(request, block_count),
            result: 0,
        }));
        count
    }
}

impl Backend for NullChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        match requests {
            [request] if self.alone.is_none() && self.ready.len() == 0 => {
                self.alone = Some((request.token, outcome(request, self.limits.block_count)));
                1
            }
            _ => self.submit_batch(requests),
        }
    }

    #[inline]
    fn poll(&mut self, _now: Instant, answers: &mut Answers) -> usize {
        match self.alone {
            Some((token, outcome)) if answers.room() > 0 => {
                self.alone = None;
                answers.push(Answer { token, outcome, result: 0 });
                1 + if self.ready.len() > 0 { self.ready.give(answers) } else { 0 }
            }
            _ => self.ready.give(answers),
        }
    }

    fn wake_at(&self) -> Instant {
        if self.has_answers() { Instant::default() } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        self.has_answers()
    }
}

#[inline]
fn outcome(request: &Request, block_count: u64) -> Outcome {
    // The operand is zero unless it is the first source block of a copy, so the larger of the two
    // decides, and no branch is needed to know which operation it is.
    let first = request.lba.max(request.operand);
    let fits = first.saturating_add(u64::from(request.blocks)) <= block_count;
    if fits { Outcome::SUCCESS } else { Outcome::LBA_OUT_OF_RANGE }
}

#[cfg(test)]
mod tests {
    use base::{Answers, Instant, Medium, Operation, Outcome, Request};

    use super::Null;

    #[test]
    fn answers_come_in_the_order_of_their_requests_alone_or_in_batches() {
        let mut channel = Null::new(512, 8).unwrap().channel().unwrap();
        let now = Instant::default();
        // Those from 4 on lie past the end.
        let request = |token| Request {
            token,
            lba: token * 2,
            blocks: 1,
            operation: Operation::Read,
            ..Request::NOTHING
        };
        let mut got = Vec::new();
        let mut poll = |channel: &mut Box<dyn base::Backend>, room| {
            let mut answers = Answers::with_capacity(room);
            assert_eq!(channel.poll(now, &mut answers), answers.len());
            got.extend(answers.drain().map(|answer| (answer.token, answer.outcome)));
        };
        assert_eq!(channel.submit(now, &[request(0)], &[]), 1);
        assert!(channel.arm(), "it has an answer");
        poll(&mut channel, 0);
        assert_eq!(channel.submit(now, &[request(1), request(2)], &[]), 2);
        poll(&mut channel, 1);
        assert_eq!(channel.submit(now, &[request(3)], &[]), 1);
        poll(&mut channel, 2);
        assert_eq!(channel.submit(now, &[request(4)], &[]), 1);
        poll(&mut channel, 9);
        assert!(!channel.arm());
        let expected = [0, 1, 2, 3].map(|token| (token, Outcome::SUCCESS));
        assert_eq!(got[..4], expected);
        assert_eq!(got[4..], [(4, Outcome::LBA_OUT_OF_RANGE)]);
    }
}
