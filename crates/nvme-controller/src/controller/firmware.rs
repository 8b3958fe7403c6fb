//! Firmware: image download and firmware slots (Base 2.1 §3.11, §5.1.8, §5.1.9).
//!
//! An emulated controller runs the code of this program, not its firmware image. An image only changes
//! the reported revision. It consists of a magic number, a revision, and arbitrary data:
//!
//! ```text
//!   0          8           16
//!   | TENMILFW | revision  | anything
//! ```

use tenmil_wire::Status;
use tenmil_wire::admin::CommitAction;

/// Firmware slots of a subsystem.
#[derive(Clone, Debug)]
pub(super) struct FirmwareSlots {
    /// Revision in each slot; the first slot is read-only.
    revisions: [Option<[u8; 8]>; SLOTS as usize],
    /// Active slot: 1 to [`SLOTS`].
    active: u8,
    /// Slot activated by the next reset, or 0.
    next: u8,
}

/// Firmware image download in progress.
#[derive(Clone, Debug)]
pub(super) struct FirmwareDownload {
    bytes_max: u32,
    image: Vec<u8>,
    /// Received parts: first byte and end, in ascending order.
    parts: Vec<(u32, u32)>,
}

/// Number of slots; the first is read-only.
pub(super) const SLOTS: u8 = 3;

/// Parts of an image are multiples of this (FWUG has units of 4 KiB).
pub(super) const GRANULARITY_BYTES: u32 = 4096;

/// Maximum number of parts of an image.
const PARTS_MAX: usize = 4096;

const MAGIC: &[u8; 8] = b"TENMILFW";

/// Builds an image that changes the reported revision to `revision`, cut or padded to eight characters.
pub fn build_firmware_image(revision: &str) -> Vec<u8> {
    let mut image = MAGIC.to_vec();
    image.extend(revision.bytes().chain(core::iter::repeat(b' ')).take(8));
    image.resize(GRANULARITY_BYTES as usize, 0);
    image
}

impl FirmwareSlots {
    pub(super) fn new(revision: &str) -> Self {
        let mut bytes = [b' '; 8];
        for (byte, event) in bytes.iter_mut().zip(revision.bytes()) {
            *byte = event;
        }
        Self { revisions: [Some(bytes), None, None], active: 1, next: 0 }
    }

    /// Active revision.
    pub(super) fn active_revision(&self) -> [u8; 8] {
        self.slot_revision(self.active).unwrap_or([b' '; 8])
    }

    /// Revision in a slot, from 1.
    pub(super) fn slot_revision(&self, slot: u8) -> Option<[u8; 8]> {
        self.revisions.get(usize::from(slot).wrapping_sub(1)).copied().flatten()
    }

    /// Active slot, and the slot activated by the next reset; 0 for no change.
    pub(super) const fn active_and_next_slot(&self) -> (u8, u8) {
        (self.active, self.next)
    }

    /// Executes a Firmware Commit. For `slot` 0 the controller selects one. `Ok(true)` means that another
    /// revision is active from now on.
    pub(super) fn commit(
        &mut self,
        action: CommitAction,
        slot: u8,
        revision: Option<[u8; 8]>,
    ) -> Result<bool, Status> {
        if slot > SLOTS {
            return Err(Status::INVALID_FIRMWARE_SLOT);
        }
        // Slot 1 is read-only: it can be activated, but not written.
        let stores = match action {
            CommitAction::Replace | CommitAction::ReplaceAndActivate => true,
            CommitAction::Activate => false,
            CommitAction::ActivateNow => revision.is_some(),
            _ => return Err(Status::INVALID_FIELD),
        };
        let slot = match slot {
            0 if stores => self.slot_for_commit_to_zero(),
            0 => return Err(Status::INVALID_FIRMWARE_SLOT),
            1 if stores => return Err(Status::INVALID_FIRMWARE_SLOT),
            slot => slot,
        };
        if stores {
            let revision = revision.ok_or(Status::INVALID_FIRMWARE_IMAGE)?;
            self.revisions[usize::from(slot) - 1] = Some(revision);
        } else if self.slot_revision(slot).is_none() {
            return Err(Status::INVALID_FIRMWARE_IMAGE);
        }
        match action {
            CommitAction::ReplaceAndActivate | CommitAction::Activate => self.next = slot,
            CommitAction::ActivateNow => (self.active, self.next) = (slot, 0),
            _ => {}
        }
        Ok(action == CommitAction::ActivateNow)
    }

    /// Handles a reset: activates the pending slot.
    pub(super) const fn activate(&mut self) {
        if self.next != 0 {
            self.active = self.next;
            self.next = 0;
        }
    }

    /// First empty slot, or a writable one that is not active.
    fn slot_for_commit_to_zero(&self) -> u8 {
        let writable = || 2..=SLOTS;
        let empty = writable().find(|&slot| self.slot_revision(slot).is_none());
        let idle = || writable().find(|&slot| slot != self.active);
        empty.or_else(idle).unwrap_or(2)
    }
}

impl FirmwareDownload {
    pub(super) const fn new(bytes_max: u32) -> Self {
        Self { bytes_max, image: Vec::new(), parts: Vec::new() }
    }

    /// Checks offset and length of a part of the image.
    pub(super) fn check_part(&self, offset: u64, len_bytes: u32) -> Result<(), Status> {
        let aligned = len_bytes.is_multiple_of(GRANULARITY_BYTES)
            && offset.is_multiple_of(u64::from(GRANULARITY_BYTES));
        if !aligned || offset + u64::from(len_bytes) > u64::from(self.bytes_max) {
            return Err(Status::INVALID_FIELD);
        }
        Ok(())
    }

    /// Stores a part of the image.
    pub(super) fn write_part(&mut self, offset: u64, part: &[u8]) -> Result<(), Status> {
        let len_bytes = u32::try_from(part.len()).map_err(|_| Status::INVALID_FIELD)?;
        self.check_part(offset, len_bytes)?;
        let first = u32::try_from(offset).map_err(|_| Status::INVALID_FIELD)?;
        let end = first + len_bytes;
        if self.parts.iter().any(|&(other, other_end)| first < other_end && other < end) {
            return Err(Status::OVERLAPPING_RANGE);
        }
        if self.parts.len() >= PARTS_MAX {
            return Err(Status::NOT_ENOUGH_RESOURCES);
        }
        if self.image.len() < end as usize {
            self.image.resize(end as usize, 0);
        }
        self.image[first as usize..end as usize].copy_from_slice(part);
        self.parts.push((first, end));
        self.parts.sort_unstable();
        Ok(())
    }

    /// Finishes the download and returns the image's revision; `Ok(None)` if nothing was downloaded. The
    /// next part starts a new download.
    pub(super) fn finish_image(&mut self) -> Result<Option<[u8; 8]>, Status> {
        let download = core::mem::replace(self, Self::new(self.bytes_max));
        if download.parts.is_empty() {
            return Ok(None);
        }
        let mut expected = 0;
        for (first, end) in download.parts {
            if first != expected {
                return Err(Status::INVALID_FIRMWARE_IMAGE);
            }
            expected = end;
        }
        let (magic, rest) = download.image.split_first_chunk().unwrap_or((&[0; 8], &[]));
        let revision: Option<&[u8; 8]> = rest.first_chunk();
        match revision {
            Some(revision)
                if magic == MAGIC && revision.iter().all(|byte| (b' '..=b'~').contains(byte)) =>
            {
                Ok(Some(*revision))
            }
            _ => Err(Status::INVALID_FIRMWARE_IMAGE),
        }
    }

    /// Handles a controller reset: discards the received parts.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.bytes_max);
    }
}

#[cfg(test)]
mod tests {
    use tenmil_wire::Status;
    use tenmil_wire::admin::CommitAction as Action;

    use super::{FirmwareDownload, FirmwareSlots, build_firmware_image};

    const NEW: Option<[u8; 8]> = Some(*b"2.0     ");

    fn sample_slots() -> FirmwareSlots {
        FirmwareSlots::new("1.0")
    }

    #[test]
    fn commit_action_decides_when_firmware_is_activated() {
        for (action, before, after) in [
            (Action::Replace, b"1.0     ", b"1.0     "),
            (Action::ReplaceAndActivate, b"1.0     ", b"2.0     "),
            (Action::ActivateNow, b"2.0     ", b"2.0     "),
        ] {
            let mut slots = sample_slots();
            assert_eq!(slots.commit(action, 2, NEW), Ok(before == b"2.0     "), "{action:?}");
            assert_eq!(&slots.active_revision(), before);
            slots.activate();
            assert_eq!(&slots.active_revision(), after);
            assert_eq!(slots.slot_revision(2), NEW);
        }
    }

    #[test]
    fn firmware_slot_can_be_activated_later() {
        let mut slots = sample_slots();
        slots.commit(Action::Replace, 3, NEW).unwrap();
        slots.commit(Action::Activate, 3, None).unwrap();
        assert_eq!(slots.active_and_next_slot(), (1, 3));
        slots.activate();
        assert_eq!((slots.active_and_next_slot(), slots.active_revision()), ((3, 0), *b"2.0     "));
        assert_eq!(slots.commit(Action::ActivateNow, 1, None), Ok(true));
        assert_eq!(&slots.active_revision(), b"1.0     ");
    }

    #[test]
    fn commit_to_invalid_read_only_or_empty_slot_is_rejected() {
        let slot = Err(Status::INVALID_FIRMWARE_SLOT);
        let image = Err(Status::INVALID_FIRMWARE_IMAGE);
        for (action, number, revision, expected) in [
            (Action::Replace, 4, NEW, slot),
            (Action::Replace, 7, NEW, slot),
            (Action::Replace, 1, NEW, slot),
            (Action::ReplaceAndActivate, 1, NEW, slot),
            (Action::ActivateNow, 1, NEW, slot),
            (Action::Activate, 0, None, slot),
            (Action::ActivateNow, 0, None, slot),
            (Action::Replace, 2, None, image),
            (Action::Activate, 2, None, image),
            (Action::ActivateNow, 3, None, image),
            (Action::ReplaceBootPartition, 2, NEW, Err(Status::INVALID_FIELD)),
            (Action::ActivateBootPartition, 2, NEW, Err(Status::INVALID_FIELD)),
            (Action::Reserved(4), 2, NEW, Err(Status::INVALID_FIELD)),
        ] {
            assert_eq!(
                sample_slots().commit(action, number, revision),
                expected,
                "{action:?} {number}"
            );
        }
    }

    #[test]
    fn slot_zero_selects_an_inactive_slot() {
        let mut slots = sample_slots();
        slots.commit(Action::ActivateNow, 0, NEW).unwrap();
        assert_eq!(slots.active_and_next_slot(), (2, 0));
        slots.commit(Action::Replace, 0, Some(*b"3.0     ")).unwrap();
        assert_eq!(slots.slot_revision(3), Some(*b"3.0     "));
        slots.commit(Action::Replace, 0, Some(*b"4.0     ")).unwrap();
        assert_eq!(slots.slot_revision(3), Some(*b"4.0     "), "slot 2 runs");
    }

    #[test]
    fn firmware_parts_may_be_out_of_order_but_not_overlap_or_leave_gaps() {
        let mut whole = build_firmware_image("2.0");
        whole.resize(3 * 4096, 7);
        let mut download = FirmwareDownload::new(1 << 20);
        for part in [2_u16, 0, 1] {
            let bytes = &whole[usize::from(part) * 4096..][..4096];
            download.write_part(u64::from(part) * 4096, bytes).unwrap();
        }
        assert_eq!(download.write_part(4096, &[0; 4096]), Err(Status::OVERLAPPING_RANGE));
        assert_eq!(download.finish_image(), Ok(NEW));
        assert_eq!(download.finish_image(), Ok(None), "it was taken");

        download.write_part(0, &whole[..4096]).unwrap();
        download.write_part(8192, &whole[8192..]).unwrap();
        assert_eq!(download.finish_image(), Err(Status::INVALID_FIRMWARE_IMAGE), "a hole");
    }

    #[test]
    fn misaligned_or_oversized_firmware_part_is_rejected() {
        let mut download = FirmwareDownload::new(8192);
        for (offset, len) in [(1, 4096), (4, 4096), (0, 4095), (4096, 8192), (8192, 4096)] {
            assert_eq!(download.write_part(offset, &vec![0; len]), Err(Status::INVALID_FIELD));
        }
        assert_eq!(download.check_part(u64::from(u32::MAX) * 4, 4096), Err(Status::INVALID_FIELD));
    }

    #[test]
    fn invalid_firmware_image_is_rejected() {
        for spoil in [0, 7, 8, 15] {
            let mut download = FirmwareDownload::new(1 << 20);
            let mut bytes = build_firmware_image("2.0");
            bytes[spoil] = 0x07;
            download.write_part(0, &bytes).unwrap();
            assert_eq!(
                download.finish_image(),
                Err(Status::INVALID_FIRMWARE_IMAGE),
                "byte {spoil}"
            );
        }
        assert_eq!(build_firmware_image("123456789")[..16], *b"TENMILFW12345678");
    }
}
