//! The driver of jobs: does what a job wants, now or when a host or a medium has answered.

use base::{
    Ended, Fault, HostMemory, Instant, Operation, Outcome, Progress, Request, Segment, Ticket,
};
use wire::Status;

use super::area::{Aim, Area, Wait};
use super::job::{Event, Job, Place, Step, Work};
use super::{Letter, Queue, TICKET_FETCH, TICKET_KIND, TICKET_LIST, TICKET_POST};
use crate::buffers::Buffers;
use crate::transfer::{Moved, Next, Target, Walk};

/// How far a step got.
enum Did {
    /// It is done.
    Now(Event),
    /// The area waits.
    Later,
    /// It failed.
    Failed(Status),
}

/// Ends of host accesses that are heard in one turn.
const ENDED_MAX: usize = 256;

impl<H: HostMemory> Queue<H> {
    /// Goes on with the job in an area after `event`, as far as it goes.
    pub(super) fn drive(&mut self, now: Instant, index: u16, mut event: Event) {
        loop {
            let area = self.areas.get(index);
            area.wait = Wait::Nothing;
            let step = match area.cancelled {
                Some(status) => Step::End(status, 0),
                None => area.job.next(event, &area.command, &area.bytes),
            };
            let did = match step {
                Step::Walk { len_bytes, direction } => {
                    area.direction = direction;
                    let started = Walk::start(
                        &area.command,
                        len_bytes,
                        direction,
                        self.page_shift,
                        &mut area.pieces,
                    );
                    match started {
                        Ok((walk, next)) => {
                            area.walk = walk;
                            self.follow(index, next)
                        }
                        Err(status) => Did::Failed(status),
                    }
                }
                Step::Reach => self.reach(index),
                Step::TakeBuffer { is_zeroed } => self.take_buffer(index, is_zeroed),
                Step::FromHost(len) | Step::ToHost(len) => self.begin_move(index, Aim::Buffer, len),
                Step::Check(len) => self.begin_move(index, Aim::Check, len),
                Step::Fetch(len) => {
                    area.bytes.clear();
                    area.bytes.resize(len as usize, 0);
                    self.begin_move(index, Aim::Bytes, len)
                }
                Step::Return(len) => self.begin_move(index, Aim::Bytes, len),
                Step::Submit(work) => self.submit_work(now, index, work),
                Step::FlushFrom(channel) => self.flush_from(now, index, channel),
                Step::Forward => self.forward(index),
                Step::End(status, result) => {
                    self.finish(now, index, status, result);
                    return;
                }
            };
            event = match did {
                Did::Now(event) => event,
                Did::Later => return,
                Did::Failed(status) => {
                    self.finish(now, index, status, 0);
                    return;
                }
            };
        }
    }

    /// A medium has answered a command with an area.
    pub(super) fn answered(&mut self, now: Instant, index: u16, outcome: Outcome) {
        let area = self.areas.get(index);
        if area.wait == Wait::Medium {
            let event = match area.job {
                Job::FlushAll(_) => Event::Flushed(Some((area.channel, outcome))),
                _ => Event::Answered(outcome),
            };
            self.drive(now, index, event);
        }
    }

    /// Takes what the host has answered. True if there was anything.
    pub(super) fn hear_host(&mut self, now: Instant) -> bool {
        for heard in 0..ENDED_MAX {
            let Some(ended) = self.host.poll() else { return heard > 0 };
            let number = ended.ticket.0 & !TICKET_KIND;
            match ended.ticket.0 & TICKET_KIND {
                TICKET_FETCH => self.fetched(ended, number),
                TICKET_POST => {
                    self.ring_accesses = self.ring_accesses.saturating_sub(1);
                    let fault = Fault { iova: 0, len_bytes: 16 };
                    self.stored(ended.result.map(|()| Progress::Done).map_err(|_| fault));
                }
                _ => self.host_ended(now, ended),
            }
        }
        true
    }

    /// Goes on with areas that may have waited long enough.
    pub(super) fn revive(&mut self, now: Instant) {
        while let Some(&index) = self.want_buffer.front() {
            let Wait::Buffer { is_zeroed } = self.areas.get(index).wait else {
                self.want_buffer.pop_front();
                continue;
            };
            let Some(event) = lend(&self.buffers, self.areas.get(index), is_zeroed) else { break };
            self.want_buffer.pop_front();
            self.drive(now, index, event);
        }
        for _ in 0..self.want_room.len() {
            let Some(index) = self.want_room.pop_front() else { break };
            if let Wait::Room(request) = self.areas.get(index).wait {
                self.try_submit(now, index, request);
            }
        }
        self.try_pair(now);
    }

    /// What came of storing a completion.
    #[inline]
    pub(super) fn stored(&mut self, stored: Result<Progress, Fault>) {
        match stored {
            Ok(Progress::Done) => self.posted += 1,
            Ok(Progress::Later) => self.ring_accesses += 1,
            Err(fault) => self.break_down(fault),
        }
    }

    /// Ends the command in an area, whose memory nobody touches any more.
    pub(super) fn finish(&mut self, now: Instant, index: u16, status: Status, result: u32) {
        let area = self.areas.get(index);
        let slot = area.slot;
        if let Some(buffer) = area.buffer.take() {
            self.buffers.give(buffer);
        }
        self.areas.release(index);
        self.complete(slot, status, result);
        self.pair_ended(now, index, status);
    }

    fn fetched(&mut self, ended: Ended, sqid: u32) {
        self.ring_accesses = self.ring_accesses.saturating_sub(1);
        if let Err(fault) = ended.result {
            self.break_down(fault);
        }
        let queue = self.submissions.iter_mut().find(|queue| u32::from(queue.id) == sqid);
        if let Some(queue) = queue {
            queue.fetched(&mut self.host, ended);
        }
    }

    /// An access for an area has ended.
    fn host_ended(&mut self, now: Instant, ended: Ended) {
        let Some((index, area)) = self.areas.find(ended.ticket.0 >> 4) else { return };
        let did = match (area.wait, ended.ticket.0 & 0xf) {
            (Wait::List { len_bytes }, TICKET_LIST) => {
                area.wait = Wait::Nothing;
                match ended.result {
                    Ok(()) => {
                        let list = &mut self.scratch[..len_bytes as usize];
                        self.host.collect(ended.ticket, list);
                        // A cancelled command asks for nothing more.
                        match (area.cancelled, area.walk.feed(list, &mut area.pieces)) {
                            (None, Ok(next)) => self.follow(index, next),
                            (Some(status), _) | (None, Err(status)) => Did::Failed(status),
                        }
                    }
                    Err(_) => Did::Failed(Status::DATA_TRANSFER_ERROR),
                }
            }
            (Wait::Host(aim), _) => {
                let (mover, direction) = (&mut area.mover, area.direction);
                let mut target =
                    target(&self.buffers, aim, area.buffer, &mut area.bytes, &mut area.differs);
                mover.end(&mut self.host, ended, direction, &mut target, &mut self.scratch);
                self.go_on_moving(index, aim)
            }
            _ => return,
        };
        match did {
            Did::Now(event) => self.drive(now, index, event),
            Did::Later => {}
            Did::Failed(status) => {
                let status = self.areas.get(index).cancelled.unwrap_or(status);
                self.finish(now, index, status, 0);
            }
        }
    }

    /// Sees to it that the walk gets the lists it wants.
    fn follow(&mut self, index: u16, mut next: Next) -> Did {
        let area = self.areas.get(index);
        loop {
            let Next::List { iova, len_bytes } = next else { return Did::Now(Event::Walked) };
            let list = &mut self.scratch[..len_bytes as usize];
            match self.host.read(Ticket(u32::from(index) << 4 | TICKET_LIST), iova, list) {
                Ok(Progress::Done) => match area.walk.feed(list, &mut area.pieces) {
                    Ok(following) => next = following,
                    Err(status) => return Did::Failed(status),
                },
                Ok(Progress::Later) => {
                    area.wait = Wait::List { len_bytes };
                    return Did::Later;
                }
                Err(_) => return Did::Failed(Status::DATA_TRANSFER_ERROR),
            }
        }
    }

    /// Asks where the medium finds the data, piece by piece. Every piece is asked for, so that data
    /// of which a part is nowhere is refused before anything is done.
    fn reach(&mut self, index: u16) -> Did {
        let Area { pieces, segments, .. } = self.areas.get(index);
        segments.clear();
        let mut is_reached = true;
        for piece in pieces.as_slice() {
            if piece.is_bucket {
                is_reached = false;
                continue;
            }
            match self.host.reach(piece.iova, piece.len_bytes) {
                Ok(Some(segment)) => append(segments, segment),
                Ok(None) => is_reached = false,
                Err(_) => return Did::Failed(Status::DATA_TRANSFER_ERROR),
            }
        }
        Did::Now(Event::Reached(is_reached.then_some(segments.len())))
    }

    fn take_buffer(&mut self, index: u16, is_zeroed: bool) -> Did {
        if self.buffers.count() == 0 {
            return Did::Failed(Status::DATA_TRANSFER_ERROR);
        }
        let area = self.areas.get(index);
        if self.want_buffer.is_empty()
            && let Some(event) = lend(&self.buffers, area, is_zeroed)
        {
            return Did::Now(event);
        }
        area.wait = Wait::Buffer { is_zeroed };
        self.want_buffer.push_back(index);
        Did::Later
    }

    fn begin_move(&mut self, index: u16, aim: Aim, len_bytes: u32) -> Did {
        self.areas.get(index).mover.begin(len_bytes);
        self.go_on_moving(index, aim)
    }

    fn go_on_moving(&mut self, index: u16, aim: Aim) -> Did {
        let area = self.areas.get(index);
        let (tickets, direction) = (u32::from(index) << 4, area.direction);
        let mut target =
            target(&self.buffers, aim, area.buffer, &mut area.bytes, &mut area.differs);
        let moved = area.mover.run(
            &mut self.host,
            tickets,
            &area.pieces,
            direction,
            &mut target,
            &mut self.scratch,
        );
        match moved {
            Moved::Whole => Did::Now(Event::Moved { differs: area.differs }),
            Moved::Waiting => {
                area.wait = Wait::Host(aim);
                Did::Later
            }
            Moved::Failed => Did::Failed(Status::DATA_TRANSFER_ERROR),
        }
    }

    fn submit_work(&mut self, now: Instant, index: u16, work: Work) -> Did {
        let area = self.areas.get(index);
        let is_there = match work.data {
            Place::Nowhere => {
                area.part.clear();
                true
            }
            Place::Reached { at_bytes, len_bytes } => area.cut(at_bytes, len_bytes),
            Place::Buffer { len_bytes } => {
                area.part.clear();
                area.part.extend(area.buffer.and_then(|buffer| buffer.slice(0, len_bytes)));
                !area.part.is_empty()
            }
        };
        if !is_there {
            return Did::Failed(Status::INTERNAL_ERROR);
        }
        let request = Request {
            token: area.slot.into(),
            lba: work.lba,
            operand: work.operand,
            blocks: work.blocks,
            segment_first: 0,
            segment_count: u16::try_from(area.part.len()).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation: work.operation,
            flags: work.flags,
        };
        self.try_submit(now, index, request);
        Did::Later
    }

    fn try_submit(&mut self, now: Instant, index: u16, request: Request) {
        let area = self.areas.get(index);
        let channel = self.directory.channel(area.channel);
        if channel.is_some_and(|channel| channel.submit_one(now, &request, &area.part)) {
            area.wait = Wait::Medium;
        } else {
            area.wait = Wait::Room(request);
            self.want_room.push_back(index);
        }
    }

    /// Flushes the first medium from `from` on that has anything to flush.
    fn flush_from(&mut self, now: Instant, index: u16, from: u16) -> Did {
        let found = self.directory.open_channels().find(|(number, channel)| {
            *number >= from && (channel.can_flush() || channel.must_flush())
        });
        let Some((number, channel)) = found else { return Did::Now(Event::Flushed(None)) };
        if !channel.can_flush() {
            return Did::Now(Event::Flushed(Some((number, Outcome::INVALID_OPCODE))));
        }
        self.areas.get(index).channel = number;
        let flags = base::Flags::NONE;
        let (operation, data) = (Operation::Flush, Place::Nowhere);
        self.submit_work(now, index, Work { operation, flags, lba: 0, operand: 0, blocks: 0, data })
    }

    fn forward(&mut self, index: u16) -> Did {
        let area = self.areas.get(index);
        area.wait = Wait::Controller;
        let (command, bytes) = (area.command, area.bytes.clone());
        self.write(Letter::Reservation { ticket: index.into(), command, bytes });
        Did::Later
    }
}

/// Appends a segment, or lengthens the last one if it follows.
fn append(segments: &mut Vec<Segment>, segment: Segment) {
    match segments.last_mut() {
        Some(last)
            if last.region == segment.region
                && last.offset + u64::from(last.len_bytes) == segment.offset =>
        {
            last.len_bytes += segment.len_bytes;
        }
        _ => segments.push(segment),
    }
}

/// Lends a buffer to an area.
fn lend(buffers: &Buffers, area: &mut Area, is_zeroed: bool) -> Option<Event> {
    let buffer = buffers.take()?;
    if is_zeroed && buffers.memory().fill(buffer, 0).is_err() {
        // A pool that names memory it has not got: the medium will refuse the segment.
        debug_assert!(false, "a buffer outside its memory");
    }
    area.buffer = Some(buffer);
    Some(Event::Buffered(buffer.len_bytes))
}

/// The place of a move.
fn target<'a>(
    buffers: &'a Buffers,
    aim: Aim,
    buffer: Option<Segment>,
    bytes: &'a mut [u8],
    differs: &'a mut bool,
) -> Target<'a> {
    let segment = buffer.unwrap_or_default();
    match aim {
        Aim::Bytes => Target::Bytes(bytes),
        Aim::Buffer => Target::Buffer(buffers.memory(), segment),
        Aim::Check => Target::Expected { memory: buffers.memory(), segment, differs },
    }
}
