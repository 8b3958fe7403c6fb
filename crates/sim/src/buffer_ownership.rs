//! Buffer ownership: which buffers the device may access.
//!
//! The rule depends only on what the *host* can observe. The device owns a command from the moment
//! it is stored in a ring until
//!
//! - a completion with its identifier becomes visible in memory,
//! - the host has read CSTS.RDY=0 after clearing CC.EN,
//! - its submission queue has been deleted, or
//! - the DMA access of the device has been revoked.
//!
//! Until then the request of the command must not complete. After the request has completed, the
//! device must not access its buffer, unless a fault made the device complete the command early.

use std::collections::BTreeMap;

use tenmil_base::Instant;

use crate::iommu::page_range;
use crate::violation::Violation;

/// All buffers with requests in flight, and all commands that the device owns.
#[derive(Debug, Default)]
pub struct BufferOwnership {
    pages: BTreeMap<u64, PageOwner>,
    leased: BTreeMap<u64, BufferInUse>,
    /// By address of the submission ring and command identifier.
    commands: BTreeMap<(u64, u16), OwnedCommand>,
    /// Submission queue addresses by queue identifier.
    rings: BTreeMap<u16, u64>,
}

/// Direction of a data transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataDirection {
    /// The device writes to the buffer.
    FromDevice,
    /// The device reads the buffer.
    ToDevice,
}

/// A command stored in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedCommand {
    /// Token of its request, if its data lie in a buffer in use by the device.
    pub token: Option<u64>,
    /// Opcode.
    pub opcode: u8,
    /// Command dword 10.
    pub cdw10: u32,
    /// Data pointer.
    pub data: u64,
    /// Time at which it was stored.
    pub stored_at: Instant,
}

#[derive(Clone, Debug)]
struct BufferInUse {
    pages: Vec<u64>,
    /// An injected fault completed its command before the device had finished.
    is_tainted: bool,
}

#[derive(Clone, Copy, Debug)]
enum PageOwner {
    InUse { token: u64, direction: DataDirection },
    Returned { token: u64, at: Instant, is_tainted: bool },
}

const PAGE: u64 = 4096;
/// Delete I/O Submission Queue (Base 2.1 §5.2.4).
const DELETE_SUBMISSION_QUEUE: u8 = 0x00;
/// Create I/O Submission Queue (Base 2.1 §5.2.2).
const CREATE_SUBMISSION_QUEUE: u8 = 0x01;

impl BufferOwnership {
    /// Marks the buffers of a request as in use by the device. Buffers are tracked in whole pages.
    pub fn mark_in_use(&mut self, token: u64, buffers: &[(u64, u64)], direction: DataDirection) {
        let pages: Vec<u64> =
            buffers.iter().flat_map(|(iova, len_bytes)| page_range(*iova, *len_bytes)).collect();
        for page in &pages {
            self.pages.insert(*page, PageOwner::InUse { token, direction });
        }
        self.leased.insert(token, BufferInUse { pages, is_tainted: false });
    }

    /// Returns the buffers of a completed request to the host. Returns true if a fault has tainted
    /// them; they should not be reused then.
    pub fn return_to_host(&mut self, token: u64, at: Instant) -> Result<bool, Violation> {
        let Some(BufferInUse { pages, is_tainted }) = self.leased.remove(&token) else {
            return Ok(false);
        };
        for page in pages {
            self.pages.insert(page, PageOwner::Returned { token, at, is_tainted });
        }
        match self.commands.iter().find(|(_, command)| command.token == Some(token)) {
            None => Ok(is_tainted),
            Some(((_, cid), OwnedCommand { opcode, stored_at, .. })) => {
                let (cid, opcode, stored_at) = (*cid, *opcode, *stored_at);
                Err(Violation::CompletedEarly { token, cid, opcode, stored_at, at })
            }
        }
    }

    /// Stops tracking these buffers, whose memory returns to the pool.
    pub fn stop_tracking(&mut self, iova: u64, len_bytes: u64) {
        for page in page_range(iova, len_bytes) {
            self.pages.remove(&page);
        }
    }

    /// Records that the host has stored a command in the ring at `ring`. `data` are its data
    /// addresses.
    pub fn record_stored_command(
        &mut self,
        at: Instant,
        ring: u64,
        words: &[u64; 8],
        data: &[u64],
    ) {
        let [opcode, _, cid_low, cid_high, ..] = words[0].to_le_bytes();
        let cid = u16::from_le_bytes([cid_low, cid_high]);
        let cdw10 = low_dword(words[5]);
        if opcode == CREATE_SUBMISSION_QUEUE && self.rings.get(&0) == Some(&ring) {
            self.rings.insert(low_word(cdw10), words[3]);
        }
        let token =
            data.iter().find_map(|iova| match self.pages.get(&page_range(*iova, 1).last()?) {
                Some(PageOwner::InUse { token, .. }) => Some(*token),
                _ => None,
            });
        let command = OwnedCommand { token, opcode, cdw10, data: words[3], stored_at: at };
        self.commands.insert((ring, cid), command);
    }

    /// Records the address of the admin submission queue.
    pub fn record_admin_ring(&mut self, ring: u64) {
        self.rings.insert(0, ring);
    }

    /// Address of submission queue `sqid`.
    pub fn ring_address(&self, sqid: u16) -> Option<u64> {
        self.rings.get(&sqid).copied()
    }

    /// Command with this identifier that the device owns.
    pub fn owned_command(&self, sqid: u16, cid: u16) -> Option<OwnedCommand> {
        self.commands.get(&(self.ring_address(sqid)?, cid)).copied()
    }

    /// Admin command whose data include `iova`, and the start of those data. Both lie in the same
    /// page.
    pub fn admin_command_at(&self, iova: u64) -> Option<(OwnedCommand, u64)> {
        let ring = self.ring_address(0)?;
        let range = self.commands.range((ring, 0)..=(ring, u16::MAX));
        let mut commands = range.map(|(_, command)| *command);
        let found = commands.find(|command| {
            command.data != 0 && (command.data..command.data + PAGE).contains(&iova)
        })?;
        Some((found, found.data))
    }

    /// Commands of `sqid` that the device owns.
    pub fn commands_of(&self, sqid: u16) -> Vec<(u16, OwnedCommand)> {
        let Some(ring) = self.ring_address(sqid) else { return Vec::new() };
        let range = self.commands.range((ring, 0)..=(ring, u16::MAX));
        range.map(|((_, cid), command)| (*cid, *command)).collect()
    }

    /// Records that a completion became visible. `is_invalid` means that the device has not finished
    /// the command.
    pub fn record_completion(&mut self, sqid: u16, cid: u16, is_success: bool, is_invalid: bool) {
        let Some(command) =
            self.ring_address(sqid).and_then(|ring| self.commands.remove(&(ring, cid)))
        else {
            return;
        };
        if is_invalid && let Some(token) = command.token {
            self.taint_buffer(token);
        }
        if sqid == 0
            && is_success
            && command.opcode == DELETE_SUBMISSION_QUEUE
            && let Some(ring) = self.rings.remove(&low_word(command.cdw10))
        {
            self.commands.retain(|(of, _), _| *of != ring);
        }
    }

    /// Records that the device can access nothing any more: it is disabled or its access is
    /// revoked.
    pub fn record_device_stop(&mut self) {
        self.commands.clear();
    }

    /// Taints all buffers that are with the device.
    pub fn taint_all(&mut self) {
        let tokens: Vec<u64> = self.leased.keys().copied().collect();
        tokens.into_iter().for_each(|token| self.taint_buffer(token));
    }

    /// Violation by a device access to this memory, if it is one.
    pub fn check_device_access(
        &self,
        at: Instant,
        iova: u64,
        len_bytes: u64,
        is_write: bool,
    ) -> Result<(), Violation> {
        for page in page_range(iova, len_bytes) {
            match self.pages.get(&page) {
                Some(PageOwner::Returned { token, at: returned_at, is_tainted: false }) => {
                    let (token, returned_at) = (*token, *returned_at);
                    let touched =
                        Violation::AccessAfterCompletion { token, returned_at, iova, is_write, at };
                    return Err(touched);
                }
                Some(PageOwner::InUse { token, direction: DataDirection::ToDevice })
                    if is_write =>
                {
                    return Err(Violation::WroteSource { token: *token, iova });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn taint_buffer(&mut self, token: u64) {
        if let Some(lending) = self.leased.get_mut(&token) {
            lending.is_tainted = true;
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_dword(word: u64) -> u32 {
    word as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_word(word: u32) -> u16 {
    word as u16
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{BufferOwnership, DataDirection};
    use crate::violation::Violation;

    const BUFFER: (u64, u64) = (0x10_0000, 8192);
    const RING: u64 = 0x5000;
    const NOW: Instant = Instant { ns: 1 };

    /// The buffer of token 7 is with the device; its write command 3 is in queue 1, whose creation
    /// was recorded.
    fn ownership_with_device_buffer() -> BufferOwnership {
        let mut ledger = BufferOwnership::default();
        ledger.record_admin_ring(0x4000);
        let create = [0x01, 0, 0, RING, 0, 1, 0, 0];
        ledger.record_stored_command(NOW, 0x4000, &create, &[]);
        ledger.record_completion(0, 0, true, false);
        ledger.mark_in_use(7, &[BUFFER], DataDirection::ToDevice);
        ledger.record_stored_command(
            NOW,
            RING,
            &[0x0003_0001, 1, 0, BUFFER.0, 0, 0, 0, 0],
            &[BUFFER.0],
        );
        ledger
    }

    fn is_early_return(completion: &Result<bool, Violation>) -> bool {
        matches!(completion, Err(Violation::CompletedEarly { token: 7, cid: 3, opcode: 1, .. }))
    }

    #[test]
    fn early_completion_of_an_owned_command_is_a_violation() {
        assert!(is_early_return(&ownership_with_device_buffer().return_to_host(7, NOW)));
        let mut other_queue = ownership_with_device_buffer();
        other_queue.record_completion(0, 3, true, false);
        assert!(is_early_return(&other_queue.return_to_host(7, NOW)));
    }

    #[test]
    fn completion_deletion_and_stop_each_end_the_ownership_of_the_device() {
        let mut completed = ownership_with_device_buffer();
        completed.record_completion(1, 3, true, false);
        assert_eq!(completed.return_to_host(7, NOW), Ok(false));

        let mut stopped = ownership_with_device_buffer();
        stopped.record_device_stop();
        assert_eq!(stopped.return_to_host(7, NOW), Ok(false));

        for is_success in [true, false] {
            let mut deleted = ownership_with_device_buffer();
            deleted.record_stored_command(NOW, 0x4000, &[0x0009_0000, 0, 0, 0, 0, 1, 0, 0], &[]);
            deleted.record_completion(0, 9, is_success, false);
            assert_eq!(is_early_return(&deleted.return_to_host(7, NOW)), !is_success);
        }
    }

    #[test]
    fn access_to_a_returned_buffer_names_its_token() {
        let mut ledger = ownership_with_device_buffer();
        assert_eq!(ledger.check_device_access(NOW, BUFFER.0, 8192, false), Ok(()));
        assert!(matches!(
            ledger.check_device_access(NOW, BUFFER.0 + 4096, 1, true),
            Err(Violation::WroteSource { token: 7, .. })
        ));
        ledger.record_completion(1, 3, true, false);
        ledger.return_to_host(7, NOW).unwrap();
        for is_write in [false, true] {
            assert!(matches!(
                ledger.check_device_access(NOW, BUFFER.0 - 1, 2, is_write),
                Err(Violation::AccessAfterCompletion { token: 7, .. })
            ));
        }
        ledger.stop_tracking(BUFFER.0, BUFFER.1);
        assert_eq!(ledger.check_device_access(NOW, BUFFER.0, 1, true), Ok(()));
    }

    #[test]
    fn invalid_completion_taints_the_buffer_and_excuses_the_driver() {
        let mut ledger = ownership_with_device_buffer();
        ledger.record_completion(1, 3, true, true);
        assert_eq!(ledger.return_to_host(7, NOW), Ok(true));
        assert_eq!(ledger.check_device_access(NOW, BUFFER.0, 1, true), Ok(()));
    }
}
