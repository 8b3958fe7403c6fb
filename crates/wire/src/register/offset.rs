//! Register offsets in BAR 0, which are also property offsets (Base 2.1 §3.1.4, Figure 33).

/// CAP, 8 bytes (Base 2.1 §3.1.4.1).
pub const CAP: usize = 0x00;
/// VS (Base 2.1 §3.1.4.2).
pub const VS: usize = 0x08;
/// INTMS: Interrupt Mask Set; bit N masks vector N (Base 2.1 §3.1.4.3).
pub const INTMS: usize = 0x0c;
/// INTMC: Interrupt Mask Clear; bit N unmasks vector N (Base 2.1 §3.1.4.4).
pub const INTMC: usize = 0x10;
/// CC (Base 2.1 §3.1.4.5).
pub const CC: usize = 0x14;
/// CSTS (Base 2.1 §3.1.4.6).
pub const CSTS: usize = 0x1c;
/// NSSR: NVM Subsystem Reset (Base 2.1 §3.1.4.7).
pub const NSSR: usize = 0x20;
/// AQA (Base 2.1 §3.1.4.8).
pub const AQA: usize = 0x24;
/// ASQ, 8 bytes (Base 2.1 §3.1.4.9).
pub const ASQ: usize = 0x28;
/// ACQ, 8 bytes (Base 2.1 §3.1.4.10).
pub const ACQ: usize = 0x30;
/// CMBLOC (Base 2.1 §3.1.4.11).
pub const CMBLOC: usize = 0x38;
/// CMBSZ (Base 2.1 §3.1.4.12).
pub const CMBSZ: usize = 0x3c;
/// BPINFO (Base 2.1 §3.1.4.13).
pub const BPINFO: usize = 0x40;
/// BPRSEL (Base 2.1 §3.1.4.14).
pub const BPRSEL: usize = 0x44;
/// BPMBL, 8 bytes (Base 2.1 §3.1.4.15).
pub const BPMBL: usize = 0x48;
/// CMBMSC, 8 bytes (Base 2.1 §3.1.4.16).
pub const CMBMSC: usize = 0x50;
/// CMBSTS (Base 2.1 §3.1.4.17).
pub const CMBSTS: usize = 0x58;
/// CMBEBS (Base 2.1 §3.1.4.18).
pub const CMBEBS: usize = 0x5c;
/// CMBSWTP (Base 2.1 §3.1.4.19).
pub const CMBSWTP: usize = 0x60;
/// NSSD: NVM Subsystem Shutdown (Base 2.1 §3.1.4.20).
pub const NSSD: usize = 0x64;
/// CRTO (Base 2.1 §3.1.4.21).
pub const CRTO: usize = 0x68;
/// PMRCAP (Base 2.1 §3.1.4.22).
pub const PMRCAP: usize = 0xe00;
/// PMRCTL (Base 2.1 §3.1.4.23).
pub const PMRCTL: usize = 0xe04;
/// PMRSTS (Base 2.1 §3.1.4.24).
pub const PMRSTS: usize = 0xe08;
/// PMREBS (Base 2.1 §3.1.4.25).
pub const PMREBS: usize = 0xe0c;
/// PMRSWTP (Base 2.1 §3.1.4.26).
pub const PMRSWTP: usize = 0xe10;
/// PMRMSCL (Base 2.1 §3.1.4.27).
pub const PMRMSCL: usize = 0xe14;
/// PMRMSCU (Base 2.1 §3.1.4.28).
pub const PMRMSCU: usize = 0xe18;

/// First doorbell: the tail of the admin submission queue (PCIe 1.1 §3.1.2.1).
pub const DOORBELLS: usize = 0x1000;

/// Tail doorbell of submission queue `queue` (PCIe 1.1 §3.1.2.1).
#[inline]
#[must_use]
pub const fn submission_doorbell_offset(queue: u16, dstrd: u8) -> usize {
    doorbell_offset(2 * queue as usize, dstrd)
}

/// Head doorbell of completion queue `queue` (PCIe 1.1 §3.1.2.2).
#[inline]
#[must_use]
pub const fn completion_doorbell_offset(queue: u16, dstrd: u8) -> usize {
    doorbell_offset(2 * queue as usize + 1, dstrd)
}

/// Length of BAR 0 for queues 0 to `queue_max`.
#[inline]
#[must_use]
pub const fn bar0_len_bytes(queue_max: u16, dstrd: u8) -> usize {
    completion_doorbell_offset(queue_max, dstrd) + 4
}

const fn doorbell_offset(index: usize, dstrd: u8) -> usize {
    DOORBELLS + index * (4 << (dstrd & 0xf))
}

/// Offset of a doorbell in the shadow doorbell buffer (Base 2.1 §5.2.5): the same distances,
/// counted from zero.
#[inline]
#[must_use]
pub const fn shadow_doorbell_offset(doorbell: usize) -> Option<usize> {
    doorbell.checked_sub(DOORBELLS)
}

#[cfg(test)]
mod tests {
    use super::{
        bar0_len_bytes, completion_doorbell_offset, shadow_doorbell_offset,
        submission_doorbell_offset,
    };

    #[test]
    fn doorbell_offsets_are_a_stride_apart() {
        assert_eq!(
            (submission_doorbell_offset(0, 0), completion_doorbell_offset(0, 0)),
            (0x1000, 0x1004)
        );
        assert_eq!(
            (submission_doorbell_offset(3, 0), completion_doorbell_offset(3, 0)),
            (0x1018, 0x101c)
        );
        assert_eq!(
            (submission_doorbell_offset(1, 2), completion_doorbell_offset(1, 2)),
            (0x1020, 0x1030)
        );
        assert_eq!(bar0_len_bytes(0, 0), 0x1008);
        assert_eq!(bar0_len_bytes(u16::MAX, 15), 0x1000 + 131_071 * (4 << 15) + 4);
    }

    #[test]
    fn shadow_doorbell_offsets_equal_doorbell_distances() {
        assert_eq!(shadow_doorbell_offset(completion_doorbell_offset(1, 0)), Some(12));
        assert_eq!(shadow_doorbell_offset(0xffc), None);
    }
}
