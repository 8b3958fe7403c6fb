//! Transfers of a pool to and from its device.

use tenmil_base::{Instant, IoChannel, IoCompletion, Memory, Operation, Request, Segment};
use tenmil_volume::format::{BLOCK_BYTES, Block};
use tenmil_volume::{ActionResult, DeviceAction};

use super::{DeviceTransfer, PoolHost, PoolStage, SECTORS, SLOT_BYTES};
use crate::cluster_host::HostsShared;
use crate::cluster_simulation::RunFailure;
use crate::run_history::RecordScope;
use crate::sim_disk::BLOCK_BYTES as SECTOR_BYTES;

impl PoolHost {
    pub(super) fn zero_read_data(&mut self, token: u64, offset: u64, blocks: u64) {
        let block = |at: u64| usize::try_from(at).unwrap_or(0) * BLOCK_BYTES;
        let range = block(offset)..block(offset + blocks);
        let data = self.ops.get_mut(&token).and_then(|op| op.data.get_mut(range));
        if let Some(data) = data {
            data.fill(0);
        }
    }

    /// Submits queued transfers to the multipath queue while slots are free. Returns true if there
    /// were any.
    pub(super) fn submit_transfers(&mut self, now: Instant, queue: &mut impl IoChannel) -> bool {
        let mut is_busy = false;
        let has_read = self.under_way.values().any(|(it, ..)| matches!(it, DeviceTransfer::Open));
        if let PoolStage::Opening(opening) = &self.stage
            && !has_read
            && let Some(at) = opening.next_read()
        {
            is_busy |=
                self.queue_transfer(now, queue, DeviceTransfer::Open, (Operation::Read, at, 1));
        }
        while let Some(action) = self.backlog.front() {
            let (operation, at, blocks) = match action {
                DeviceAction::ReadPage { at, .. } => (Operation::Read, *at, 1),
                DeviceAction::ReadSlots { .. } => (Operation::Read, 0, 2),
                DeviceAction::WritePages { at, bytes, .. } => {
                    (Operation::Write, *at, (bytes.len() / BLOCK_BYTES) as u64)
                }
                DeviceAction::ReadData { at, blocks, .. } => (Operation::Read, *at, *blocks),
                DeviceAction::WriteData { at, blocks, .. } => (Operation::Write, *at, *blocks),
                _ => (Operation::Flush, 0, 0),
            };
            let action = action.clone();
            if matches!(action, DeviceAction::ReadSlots { .. }) {
                self.acknowledge_losses(queue);
            }
            let action = DeviceTransfer::Action(action);
            if !self.queue_transfer(now, queue, action, (operation, at, blocks)) {
                break;
            }
            self.backlog.pop_front();
            is_busy = true;
        }
        is_busy
    }

    fn queue_transfer(
        &mut self,
        now: Instant,
        queue: &mut impl IoChannel,
        transfer: DeviceTransfer,
        (operation, at, blocks): (Operation, u64, u64),
    ) -> bool {
        let Some(&slot) = self.free.last() else { return false };
        let bytes = u32::try_from(blocks * BLOCK_BYTES as u64).unwrap_or(u32::MAX);
        let segment = self.link.memory.slice(slot * SLOT_BYTES, bytes);
        let Some(segment) = segment.filter(|_| bytes <= SLOT_BYTES) else { return false };
        match &transfer {
            DeviceTransfer::Action(DeviceAction::WritePages { bytes, .. }) => {
                self.store_bytes(segment, bytes)
            }
            DeviceTransfer::Action(DeviceAction::WriteData { token, offset, .. }) => {
                let from = usize::try_from(*offset).unwrap_or(0) * BLOCK_BYTES;
                let data = self.ops.get(token).map_or(&[][..], |op| &op.data);
                let data = data.get(from..from + bytes as usize).unwrap_or_default().to_vec();
                self.store_bytes(segment, &data);
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
            ..Request::PLACEHOLDER
        };
        if queue.submit(now, &[request], &[segment]) == 0 {
            return false;
        }
        self.free.pop();
        self.under_way.insert(self.next_token, (transfer, slot, now));
        true
    }

    fn store_bytes(&self, segment: Segment, bytes: &[u8]) {
        // Cannot fail: the segment is part of the memory of this host.
        let _ = self.link.regions.store(segment, bytes);
    }

    /// Handles the completion of a transfer.
    pub(super) fn handle_transfer_completion(
        &mut self,
        now: Instant,
        completion: IoCompletion,
        shared: &mut HostsShared<'_>,
    ) -> Result<(), RunFailure> {
        let Some((transfer, slot, submitted)) = self.under_way.remove(&completion.token) else {
            return Ok(());
        };
        self.free.push(slot);
        let is_success = completion.status.is_success();
        let is_write = matches!(
            transfer,
            DeviceTransfer::Action(
                DeviceAction::WriteData { .. } | DeviceAction::WritePages { .. }
            )
        );
        if is_write && is_success {
            let excluded =
                shared.checker.check_no_write_after_preemption((self.number, self.disk), submitted);
            excluded
                .map_err(|why| RunFailure { scope: RecordScope::disk(self.disk), text: why })?;
        }
        let mut bytes = vec![0; SLOT_BYTES as usize];
        if let Some(segment) = self.link.memory.slice(slot * SLOT_BYTES, SLOT_BYTES) {
            let _ = self.link.regions.load(segment, &mut bytes);
        }
        let block = |at: usize| -> Block {
            let found = bytes[at * BLOCK_BYTES..].first_chunk();
            found.copied().unwrap_or([0; BLOCK_BYTES])
        };
        match (transfer, &mut self.stage) {
            (DeviceTransfer::Open, PoolStage::Opening(opening)) => {
                let first = block(0);
                opening.handle_read(if is_success { Ok(&first) } else { Err(completion.status) });
                if opening.next_read().is_none() {
                    self.handle_opened(now, shared);
                }
            }
            (DeviceTransfer::Action(action), PoolStage::Open(store)) => {
                let failed = ActionResult::Failed(completion.status);
                match action {
                    DeviceAction::ReadPage { io, .. } => {
                        let page = block(0);
                        store.handle_action_result(
                            io,
                            if is_success { ActionResult::Read(&page) } else { failed },
                        );
                    }
                    DeviceAction::ReadSlots { io } => {
                        let slots = [block(0), block(1)];
                        store.handle_action_result(
                            io,
                            if is_success { ActionResult::Slots(&slots) } else { failed },
                        );
                    }
                    DeviceAction::ReadData { io, token, offset, blocks, .. } => {
                        let from = usize::try_from(offset).unwrap_or(0) * BLOCK_BYTES;
                        let len = usize::try_from(blocks).unwrap_or(0) * BLOCK_BYTES;
                        let data = self.ops.get_mut(&token);
                        let into = data.and_then(|op| op.data.get_mut(from..from + len));
                        if let Some(into) = into {
                            into.copy_from_slice(&bytes[..len]);
                        }
                        store.handle_action_result(
                            io,
                            if is_success { ActionResult::Done } else { failed },
                        );
                    }
                    DeviceAction::WritePages { io, .. }
                    | DeviceAction::WriteData { io, .. }
                    | DeviceAction::Flush { io }
                    | DeviceAction::ReadParent { io, .. } => {
                        store.handle_action_result(
                            io,
                            if is_success { ActionResult::Done } else { failed },
                        );
                    }
                    DeviceAction::Zero { .. } => {}
                }
            }
            // A transfer of a pool that has been closed since.
            _ => {}
        }
        Ok(())
    }
}
