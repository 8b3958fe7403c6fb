//! What a pool transfers to and from its device.

use base::{Answer, Backend, Instant, Memory, Operation, Request, Segment};
use volume::format::{BLOCK_BYTES, Block};
use volume::{Action, End};

use super::{PoolHost, SECTORS, SLOT_BYTES, Stage, Transfer};
use crate::disk::BLOCK_BYTES as SECTOR_BYTES;
use crate::host::Shared;

impl PoolHost {
    pub(super) fn zero(&mut self, token: u64, offset: u64, blocks: u64) {
        let block = |at: u64| usize::try_from(at).unwrap_or(0) * BLOCK_BYTES;
        let range = block(offset)..block(offset + blocks);
        let data = self.ops.get_mut(&token).and_then(|op| op.data.get_mut(range));
        if let Some(data) = data {
            data.fill(0);
        }
    }

    /// Hands to the paths what there is room for. True if anything was.
    pub(super) fn transfer(&mut self, now: Instant, queue: &mut impl Backend) -> bool {
        let mut is_busy = false;
        let has_read = self.under_way.values().any(|(it, _)| matches!(it, Transfer::Open));
        if let Stage::Opening(opening) = &self.stage
            && !has_read
            && let Some(at) = opening.next_read()
        {
            is_busy |= self.send(now, queue, Transfer::Open, (Operation::Read, at, 1));
        }
        while let Some(action) = self.backlog.front() {
            let (operation, at, blocks) = match action {
                Action::ReadPage { at, .. } => (Operation::Read, *at, 1),
                Action::ReadSlots { .. } => (Operation::Read, 0, 2),
                Action::WritePages { at, bytes, .. } => {
                    (Operation::Write, *at, (bytes.len() / BLOCK_BYTES) as u64)
                }
                Action::ReadData { at, blocks, .. } => (Operation::Read, *at, *blocks),
                Action::WriteData { at, blocks, .. } => (Operation::Write, *at, *blocks),
                _ => (Operation::Flush, 0, 0),
            };
            let action = Transfer::Action(action.clone());
            if !self.send(now, queue, action, (operation, at, blocks)) {
                break;
            }
            self.backlog.pop_front();
            is_busy = true;
        }
        is_busy
    }

    fn send(
        &mut self,
        now: Instant,
        queue: &mut impl Backend,
        transfer: Transfer,
        (operation, at, blocks): (Operation, u64, u64),
    ) -> bool {
        let Some(&slot) = self.free.last() else { return false };
        let bytes = u32::try_from(blocks * BLOCK_BYTES as u64).unwrap_or(u32::MAX);
        let segment = self.link.memory.slice(slot * SLOT_BYTES, bytes);
        let Some(segment) = segment.filter(|_| bytes <= SLOT_BYTES) else { return false };
        match &transfer {
            Transfer::Action(Action::WritePages { bytes, .. }) => self.store(segment, bytes),
            Transfer::Action(Action::WriteData { token, offset, .. }) => {
                let from = usize::try_from(*offset).unwrap_or(0) * BLOCK_BYTES;
                let data = self.ops.get(token).map_or(&[][..], |op| &op.data);
                let data = data.get(from..from + bytes as usize).unwrap_or_default().to_vec();
                self.store(segment, &data);
            }
            _ => {}
        }
        self.next_token += 1;
        let request = Request {
            token: self.next_token,
            lba: at * SECTORS,
            blocks: bytes / u32::try_from(SECTOR_BYTES).unwrap_or(1),
            segment_count: u16::from(operation != Operation::Flush),
            operation,
            ..Request::NOTHING
        };
        if queue.submit(now, &[request], &[segment]) == 0 {
            return false;
        }
        self.free.pop();
        self.under_way.insert(self.next_token, (transfer, slot));
        true
    }

    fn store(&self, segment: Segment, bytes: &[u8]) {
        // The segment is a part of the host's own memory.
        let _ = self.link.regions.store(segment, bytes);
    }

    /// The device has answered.
    pub(super) fn end_transfer(&mut self, now: Instant, answer: Answer, shared: &mut Shared<'_>) {
        let Some((transfer, slot)) = self.under_way.remove(&answer.token) else { return };
        self.free.push(slot);
        let is_success = answer.outcome.is_success();
        let mut bytes = vec![0; SLOT_BYTES as usize];
        if let Some(segment) = self.link.memory.slice(slot * SLOT_BYTES, SLOT_BYTES) {
            let _ = self.link.regions.load(segment, &mut bytes);
        }
        let block = |at: usize| -> Block {
            let found = bytes[at * BLOCK_BYTES..].first_chunk();
            found.copied().unwrap_or([0; BLOCK_BYTES])
        };
        match (transfer, &mut self.stage) {
            (Transfer::Open, Stage::Opening(opening)) => {
                let first = block(0);
                opening.handle_read(if is_success { Ok(&first) } else { Err(answer.outcome) });
                if opening.next_read().is_none() {
                    self.opened(now, shared);
                }
            }
            (Transfer::Action(action), Stage::Open(store)) => {
                let failed = End::Failed(answer.outcome);
                match action {
                    Action::ReadPage { io, .. } => {
                        let page = block(0);
                        store.complete(io, if is_success { End::Read(&page) } else { failed });
                    }
                    Action::ReadSlots { io } => {
                        let slots = [block(0), block(1)];
                        store.complete(io, if is_success { End::Slots(&slots) } else { failed });
                    }
                    Action::ReadData { io, token, offset, blocks, .. } => {
                        let from = usize::try_from(offset).unwrap_or(0) * BLOCK_BYTES;
                        let len = usize::try_from(blocks).unwrap_or(0) * BLOCK_BYTES;
                        let data = self.ops.get_mut(&token);
                        let into = data.and_then(|op| op.data.get_mut(from..from + len));
                        if let Some(into) = into {
                            into.copy_from_slice(&bytes[..len]);
                        }
                        store.complete(io, if is_success { End::Done } else { failed });
                    }
                    Action::WritePages { io, .. }
                    | Action::WriteData { io, .. }
                    | Action::Flush { io }
                    | Action::ReadParent { io, .. } => {
                        store.complete(io, if is_success { End::Done } else { failed });
                    }
                    Action::Zero { .. } => {}
                }
            }
            // Of a pool that was closed meanwhile.
            _ => {}
        }
    }
}
