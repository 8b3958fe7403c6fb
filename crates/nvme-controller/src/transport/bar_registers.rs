//! BAR 0 as atomics, stored by the host and by the device.
//!
//! ```text
//!   0000h  registers        CAP VS INTMS INTMC CC CSTS NSSR AQA ASQ ACQ … CRTO
//!   1000h  doorbells        64 bytes per queue pair, see DoorbellPage
//!   MSI-X  vector table     16 bytes per vector, from the next page on
//!   PBA    pending bits     behind it, at the next page
//! ```
//!
//! The device notices a store of the host in its next poll. The same registers serve a host in this
//! process, which holds a [`HostBarHandle`], and a host whose accesses are trapped, through
//! [`MemoryTransport::read_register`](super::MemoryTransport::read_register) and [`write_register`](super::MemoryTransport::write_register).
//! Controller memory buffer, boot partitions and persistent memory region are not supported: their
//! registers read as zero.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tenmil_base::Wake;
use tenmil_wire::register::{SUBSYSTEM_RESET, VERSION_2_1, offset};

use super::msix_vectors::MsixVectorTable;
use crate::doorbell::{DoorbellHandle, DoorbellPage, STRIDE};

/// Registers of one controller, shared with its host.
#[derive(Debug)]
pub struct BarRegisters {
    cap: u64,
    crto: u32,
    cc: AtomicU32,
    csts: AtomicU32,
    aqa: AtomicU32,
    asq: AtomicU64,
    acq: AtomicU64,
    /// Mask set through INTMS and cleared through INTMC.
    interrupt_mask: AtomicU32,
    resets_subsystem: AtomicBool,
    /// Number of stores that the device has to notice. Incremented with release order after the store, so
    /// a device that sees the number finds the value.
    store_count: AtomicU32,
    doorbells: Arc<DoorbellPage>,
    vectors: MsixVectorTable,
}

/// Host's handle to the registers of a controller in the same process. If the controller's thread may
/// sleep, every store wakes it through `W`.
#[derive(Clone, Debug)]
pub struct HostBarHandle<W = ()> {
    bar: Arc<BarRegisters>,
    device: W,
}

/// Target of a host's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarStoreTarget {
    /// A register, or an address without effect.
    Register,
    /// The doorbell with this index.
    Doorbell(usize),
    /// An address in the doorbell range beyond the last doorbell.
    NoDoorbell,
}

/// CSTS.NSSRO (Base 2.1 §3.1.4.6).
const NSSRO: u32 = 1 << 4;
const PAGE: u32 = 0x1000;
const DOORBELLS: u32 = 0x1000;
const _: () = assert!(DOORBELLS as usize == offset::DOORBELLS);

impl BarRegisters {
    pub(super) fn new(cap: u64, crto: u32, queues: u16, vectors: u16) -> Arc<Self> {
        Arc::new(Self {
            cap,
            crto,
            cc: AtomicU32::new(0),
            csts: AtomicU32::new(0),
            aqa: AtomicU32::new(0),
            asq: AtomicU64::new(0),
            acq: AtomicU64::new(0),
            interrupt_mask: AtomicU32::new(0),
            resets_subsystem: AtomicBool::new(false),
            store_count: AtomicU32::new(0),
            doorbells: DoorbellPage::new(queues),
            vectors: MsixVectorTable::new(vectors),
        })
    }

    /// The doorbells.
    pub fn doorbells(&self) -> &Arc<DoorbellPage> {
        &self.doorbells
    }

    /// Offset of the MSI-X table, for the capability in configuration space.
    pub fn vector_table_offset(&self) -> u32 {
        let doorbells = self.doorbells.pair_count() * crate::doorbell::PAIR_BYTES;
        DOORBELLS + doorbells.next_multiple_of(PAGE)
    }

    /// Offset of the MSI-X pending bits.
    pub fn pending_bits_offset(&self) -> u32 {
        self.vector_table_offset() + self.vectors.table_len_bytes().next_multiple_of(PAGE)
    }

    /// Length of the BAR.
    pub fn len_bytes(&self) -> u32 {
        (self.pending_bits_offset() + PAGE).next_power_of_two()
    }

    /// Sets the MSI-X enable and function mask bits of configuration space. Without MSI-X, vectors 0 to
    /// 31 are masked through INTMS and INTMC.
    pub fn set_msix_control(&self, is_enabled: bool, is_masked: bool) {
        self.vectors.set_enable_and_function_mask(is_enabled, is_masked);
        self.count_store();
    }

    /// Enables MSI-X and unmasks every vector, as firmware and kernel do for a driver that does not
    /// program the table.
    pub fn enable_and_unmask_vectors(&self) {
        self.vectors.unmask_all();
        self.set_msix_control(true, false);
    }

    /// Reads `size` bytes: 1, 2, 4 or 8. Unimplemented addresses read as zero.
    pub fn read(&self, at: u32, size: u32) -> u64 {
        if size == 8 {
            let high = at.checked_add(4).map_or(0, |at| self.read32(at));
            return u64::from(self.read32(at)) | u64::from(high) << 32;
        }
        let shift = 8 * (at & 3);
        let dword = u64::from(self.read32(at & !3)) >> shift;
        dword & ((1_u64 << (8 * size.min(4))) - 1)
    }

    /// Reads an aligned dword.
    #[inline]
    pub(super) fn read32(&self, at: u32) -> u32 {
        let halves = |word: u64| [low_dword(word), low_dword(word >> 32)];
        match at as usize {
            offset::CAP => halves(self.cap)[0],
            0x04 => halves(self.cap)[1],
            offset::VS => VERSION_2_1.0,
            offset::INTMS | offset::INTMC => self.interrupt_mask.load(Ordering::Acquire),
            offset::CC => self.cc.load(Ordering::Acquire),
            offset::CSTS => self.csts.load(Ordering::Acquire),
            offset::AQA => self.aqa.load(Ordering::Acquire),
            offset::ASQ => halves(self.asq.load(Ordering::Acquire))[0],
            0x2c => halves(self.asq.load(Ordering::Acquire))[1],
            offset::ACQ => halves(self.acq.load(Ordering::Acquire))[0],
            0x34 => halves(self.acq.load(Ordering::Acquire))[1],
            offset::CRTO => self.crto,
            _ if at >= self.pending_bits_offset() => {
                self.vectors.read_pending(at - self.pending_bits_offset())
            }
            _ if at >= self.vector_table_offset() => {
                self.vectors.read(at - self.vector_table_offset())
            }
            _ => 0,
        }
    }

    /// Writes 4 or 8 aligned bytes. Other sizes and read-only registers are ignored.
    pub fn write(&self, at: u32, size: u32, value: u64) {
        self.store(at, size, value);
    }

    pub(super) fn store(&self, at: u32, size: u32, value: u64) -> BarStoreTarget {
        if !matches!(size, 4 | 8) || !at.is_multiple_of(4) {
            return BarStoreTarget::Register;
        }
        if (DOORBELLS..self.vector_table_offset()).contains(&at) {
            return self.write_doorbell(at, low_dword(value));
        }
        self.write32(at, low_dword(value));
        if size == 8 {
            self.write32(at.wrapping_add(4), low_dword(value >> 32));
        }
        BarStoreTarget::Register
    }

    fn write_doorbell(&self, at: u32, value: u32) -> BarStoreTarget {
        let (index, rest) =
            ((at - DOORBELLS) >> (2 + STRIDE), (at - DOORBELLS) & ((4 << STRIDE) - 1));
        match rest {
            0 if self.doorbells.write_doorbell(index as usize, value) => {
                BarStoreTarget::Doorbell(index as usize)
            }
            0 => BarStoreTarget::NoDoorbell,
            // The bytes between two doorbells are reserved.
            _ => BarStoreTarget::Register,
        }
    }

    fn write32(&self, at: u32, value: u32) {
        match at as usize {
            offset::INTMS => {
                self.interrupt_mask.fetch_or(value, Ordering::AcqRel);
            }
            offset::INTMC => {
                self.interrupt_mask.fetch_and(!value, Ordering::AcqRel);
            }
            offset::CC => self.cc.store(value, Ordering::Release),
            // NSSRO is write one to clear; all other bits are read-only.
            offset::CSTS => {
                self.csts.fetch_and(!(value & NSSRO), Ordering::AcqRel);
            }
            offset::NSSR if value == SUBSYSTEM_RESET => {
                self.resets_subsystem.store(true, Ordering::Release);
            }
            offset::AQA => self.aqa.store(value & 0x0fff_0fff, Ordering::Release),
            offset::ASQ => replace_low_dword(&self.asq, value),
            0x2c => replace_high_dword(&self.asq, value),
            offset::ACQ => replace_low_dword(&self.acq, value),
            0x34 => replace_high_dword(&self.acq, value),
            _ if at >= self.pending_bits_offset() => {}
            _ if at >= self.vector_table_offset() => {
                self.vectors.write(at - self.vector_table_offset(), value);
            }
            _ => return,
        }
        self.count_store();
    }

    fn count_store(&self) {
        self.store_count.fetch_add(1, Ordering::Release);
    }
}

/// Device side.
impl BarRegisters {
    /// Number of stores that may need a reaction.
    #[inline]
    pub(super) fn store_count(&self) -> u32 {
        self.store_count.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn cc(&self) -> u32 {
        self.cc.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn csts(&self) -> u32 {
        self.csts.load(Ordering::Acquire)
    }

    /// Replaces all of CSTS except NSSRO, which the host clears.
    #[inline]
    pub(super) fn publish_status(&self, status: u32) {
        let keep_reset_bit = |old: u32| Some(old & NSSRO | status & !NSSRO);
        let _ = self.csts.fetch_update(Ordering::AcqRel, Ordering::Acquire, keep_reset_bit);
    }

    /// Whether the host has requested an NVM subsystem reset. If so, the registers have been reset (Base
    /// 2.1 §3.7.1).
    pub(super) fn take_subsystem_reset_request(&self) -> bool {
        if !self.resets_subsystem.swap(false, Ordering::AcqRel) {
            return false;
        }
        for register in [&self.cc, &self.aqa, &self.interrupt_mask] {
            register.store(0, Ordering::Release);
        }
        for register in [&self.asq, &self.acq] {
            register.store(0, Ordering::Release);
        }
        self.csts.fetch_or(NSSRO, Ordering::AcqRel);
        true
    }

    /// Values of AQA, ASQ and ACQ.
    pub(super) fn admin_queues(&self) -> (u32, u64, u64) {
        let (asq, acq) = (self.asq.load(Ordering::Acquire), self.acq.load(Ordering::Acquire));
        (self.aqa.load(Ordering::Acquire), asq & !0xfff, acq & !0xfff)
    }

    pub(super) fn interrupt_mask(&self) -> u32 {
        self.interrupt_mask.load(Ordering::Acquire)
    }

    pub(super) fn msix_vector_table(&self) -> &MsixVectorTable {
        &self.vectors
    }
}

impl<W> HostBarHandle<W> {
    /// Creates a handle to `bar`; `device` wakes the controller's thread.
    pub fn new(bar: Arc<BarRegisters>, device: W) -> Self {
        Self { bar, device }
    }
}

impl<W: Wake + Clone> tenmil_base::Mmio for HostBarHandle<W> {
    type Doorbell = DoorbellHandle<W>;

    #[inline]
    fn read32(&mut self, at: u32) -> u32 {
        self.bar.read32(at)
    }

    #[inline]
    fn read64(&mut self, at: u32) -> u64 {
        self.bar.read(at, 8)
    }

    fn write32(&mut self, at: u32, value: u32) {
        self.bar.write(at, 4, value.into());
        self.device.wake();
    }

    fn write64(&mut self, at: u32, value: u64) {
        self.bar.write(at, 8, value);
        self.device.wake();
    }

    fn doorbell(&mut self, at: u32) -> DoorbellHandle<W> {
        let index =
            at.checked_sub(DOORBELLS).map_or(usize::MAX, |at| (at >> (2 + STRIDE)) as usize);
        DoorbellHandle::new(self.bar.doorbells.clone(), index, self.device.clone())
    }
}

/// Replaces half of a register. The compare-and-swap preserves the other half if two host threads write
/// both at once, which is a host error.
fn replace_low_dword(register: &AtomicU64, value: u32) {
    let put = |old: u64| Some(old & !0xffff_ffff | u64::from(value));
    let _ = register.fetch_update(Ordering::AcqRel, Ordering::Acquire, put);
}

fn replace_high_dword(register: &AtomicU64, value: u32) {
    let put = |old: u64| Some(old & 0xffff_ffff | u64::from(value) << 32);
    let _ = register.fetch_update(Ordering::AcqRel, Ordering::Acquire, put);
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_dword(word: u64) -> u32 {
    word as u32
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::{BarRegisters, BarStoreTarget, HostBarHandle};
    use tenmil_base::{Doorbell, Mmio, Wake};
    use tenmil_wire::register::offset;

    fn sample_registers() -> std::sync::Arc<BarRegisters> {
        BarRegisters::new(0x1122_3344_5566_7788, 20, 3, 4)
    }

    #[test]
    fn register_loads_of_every_width_agree() {
        let bar = sample_registers();
        assert_eq!(bar.read(0, 8), 0x1122_3344_5566_7788);
        assert_eq!(bar.read(4, 4), 0x1122_3344);
        assert_eq!(bar.read(2, 2), 0x5566);
        assert_eq!(bar.read(7, 1), 0x11);
        assert_eq!(bar.read(8, 4), 0x0002_0100, "version 2.1");
        assert_eq!(bar.read(0x68, 4), 20);
        assert_eq!(bar.read(0x38, 8), 0, "no controller memory buffer");
        assert_eq!(bar.read(u32::MAX - 3, 8), 0);
    }

    #[test]
    fn read_only_register_bits_ignore_stores() {
        let bar = sample_registers();
        for (at, ones) in [
            (offset::CAP, None),
            (offset::VS, None),
            (offset::CSTS, None),
            (offset::NSSR, None),
            (offset::CRTO, None),
            (offset::CMBLOC, None),
            (offset::CC, Some(u32::MAX)),
            (offset::AQA, Some(0x0fff_0fff)),
            (offset::ASQ, Some(u32::MAX)),
            (0x2c, Some(u32::MAX)),
            (offset::ACQ, Some(u32::MAX)),
            (0x34, Some(u32::MAX)),
        ] {
            let at = u32::try_from(at).unwrap();
            let before = bar.read(at, 4);
            bar.write(at, 4, u64::from(u32::MAX));
            assert_eq!(bar.read(at, 4), ones.map_or(before, u64::from), "{at:x}");
        }
        bar.write(0x28, 8, 0x1_2345_6789);
        assert_eq!(bar.read(0x28, 8), 0x1_2345_6789);
        bar.write(0x28, 2, 7);
        bar.write(0x29, 4, 7);
        assert_eq!(bar.read(0x28, 8), 0x1_2345_6789, "no such access");
    }

    #[test]
    fn intms_and_intmc_set_and_clear_mask_bits() {
        let bar = sample_registers();
        bar.write(0x0c, 4, 0b1010);
        bar.write(0x0c, 4, 0b0100);
        bar.write(0x10, 4, 0b1000);
        assert_eq!((bar.read(0x0c, 4), bar.read(0x10, 4)), (0b0110, 0b0110));
    }

    #[test]
    fn only_the_nssr_signature_resets_the_subsystem() {
        let bar = sample_registers();
        bar.write(0x14, 4, 1);
        bar.write(0x20, 4, 1);
        assert!(!bar.take_subsystem_reset_request());
        bar.write(0x20, 4, 0x4e56_4d65);
        assert!(bar.take_subsystem_reset_request() && !bar.take_subsystem_reset_request());
        assert_eq!((bar.read(0x14, 4), bar.read(0x1c, 4)), (0, 1 << 4));
        bar.publish_status(1);
        assert_eq!(bar.read(0x1c, 4), 1 | 1 << 4, "publishing does not clear it");
        bar.write(0x1c, 4, 1 << 4);
        assert_eq!(bar.read(0x1c, 4), 1);
    }

    #[test]
    fn doorbells_are_at_the_offsets_of_the_stride() {
        let bar = sample_registers();
        assert_eq!(bar.store(0x1000 + 2 * 32, 4, 5), BarStoreTarget::Doorbell(2));
        assert_eq!(bar.doorbells().tail(1), 5);
        HostBarHandle::new(bar.clone(), ()).doorbell(0x1000 + 3 * 32).ring(6);
        assert_eq!(bar.doorbells().head(1), 6);
        assert_eq!(bar.store(0x1000 + 8 * 32, 4, 5), BarStoreTarget::NoDoorbell);
        assert_eq!(bar.store(0x1004, 4, 5), BarStoreTarget::Register, "between two");
        HostBarHandle::new(bar.clone(), ()).doorbell(8).ring(9);
        assert_eq!(bar.doorbells().tail(0), 0, "a doorbell that is none is rung in vain");
    }

    #[test]
    fn every_store_is_counted_and_no_load() {
        let bar = sample_registers();
        let before = bar.store_count();
        let mut host = HostBarHandle::new(bar.clone(), ());
        assert_eq!((host.read32(0x14), host.read64(0x28)), (0, 0));
        assert_eq!(bar.store_count(), before);
        host.write32(0x14, 1);
        assert_ne!(bar.store_count(), before);
    }

    /// Counts its wakeups, and records the tail of queue 1 at each.
    #[derive(Clone, Default)]
    struct Sleeper {
        bar: Option<std::sync::Arc<BarRegisters>>,
        woken: Rc<Cell<(u32, u32)>>,
    }

    impl Wake for Sleeper {
        fn wake(&self) {
            let tail = self.bar.as_ref().map_or(0, |bar| bar.doorbells().tail(1));
            self.woken.set((self.woken.get().0 + 1, tail));
        }
    }

    #[test]
    fn every_store_wakes_the_controller_thread_and_no_load() {
        let bar = sample_registers();
        let sleeper = Sleeper { bar: Some(bar.clone()), ..Sleeper::default() };
        let mut host = HostBarHandle::new(bar, sleeper.clone());
        let mut doorbell = host.doorbell(0x1000 + 2 * 32);
        assert_eq!((host.read32(0), host.read64(0)), (0x5566_7788, 0x1122_3344_5566_7788));
        assert_eq!(sleeper.woken.get(), (0, 0));
        doorbell.ring(7);
        assert_eq!(sleeper.woken.get(), (1, 7), "the store comes first");
        host.write32(0x14, 1);
        host.write64(0x28, 0x1000);
        assert_eq!(sleeper.woken.get(), (3, 7));
    }
}
