//! Interrupt vectors: the MSI-X table, and the signalling of posted completions.
//!
//! ```text
//!   completions ──▶ coalesce ──▶ masked? ──▶ raise
//!                  (if enabled       └─ pending bit ── unmasked ──▶ raise
//!                   by the host)
//! ```
//!
//! Signals may merge, but none is lost: a masked vector has a pending bit, a coalesced vector has a
//! deadline.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tenmil_base::{Instant, Interrupts};

use super::bar_registers::BarRegisters;
use crate::controller::transport_interface::IoQueueCoalescing;

/// MSI-X table and pending bits (PCI Express Base 6.0 §7.7.2).
#[derive(Debug)]
pub(super) struct MsixVectorTable {
    entries: Box<[[AtomicU32; 4]]>,
    pending: Box<[AtomicU32]>,
    is_enabled: AtomicBool,
    is_masked: AtomicBool,
}

/// Device side of the vectors: coalescing and signalling.
#[derive(Debug)]
pub(super) struct InterruptVectors<I> {
    interrupts: I,
    coalescing: IoQueueCoalescing,
    /// Coalesced completions of each vector.
    coalesced: Box<[CoalescedCompletions]>,
    /// Vectors 0 to 31 that are pending and masked by INTMS.
    masked_pending: u32,
    /// Earliest deadline of coalesced completions.
    wake_at: Instant,
}

/// Completions not yet signalled.
#[derive(Clone, Copy, Debug)]
struct CoalescedCompletions {
    count: u32,
    until: Instant,
    is_exempt: bool,
}

/// Mask bit of Vector Control, set after reset.
const MASKED: u32 = 1;
const CONTROL: usize = 3;
const ENTRY_BYTES: u32 = 16;

impl MsixVectorTable {
    pub(super) fn new(vectors: u16) -> Self {
        let entry = || [0, 0, 0, MASKED].map(AtomicU32::new);
        Self {
            entries: (0..vectors).map(|_| entry()).collect(),
            pending: (0..vectors.div_ceil(32)).map(|_| AtomicU32::new(0)).collect(),
            is_enabled: AtomicBool::new(false),
            is_masked: AtomicBool::new(false),
        }
    }

    pub(super) fn table_len_bytes(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX).saturating_mul(ENTRY_BYTES)
    }

    pub(super) fn read(&self, at: u32) -> u32 {
        self.entry_dword(at).map_or(0, |dword| dword.load(Ordering::Acquire))
    }

    pub(super) fn write(&self, at: u32, value: u32) {
        if let Some(dword) = self.entry_dword(at) {
            let is_control = at / 4 % 4 == 3;
            dword.store(if is_control { value & MASKED } else { value }, Ordering::Release);
        }
    }

    pub(super) fn read_pending(&self, at: u32) -> u32 {
        self.pending.get(at as usize / 4).map_or(0, |bits| bits.load(Ordering::Acquire))
    }

    pub(super) fn set_enable_and_function_mask(&self, is_enabled: bool, is_masked: bool) {
        self.is_enabled.store(is_enabled, Ordering::Release);
        self.is_masked.store(is_masked, Ordering::Release);
    }

    pub(super) fn unmask_all(&self) {
        for entry in &self.entries {
            entry[CONTROL].store(0, Ordering::Release);
        }
    }

    fn entry_dword(&self, at: u32) -> Option<&AtomicU32> {
        self.entries.get((at / ENTRY_BYTES) as usize)?.get(at as usize / 4 % 4)
    }

    fn is_enabled(&self) -> bool {
        self.is_enabled.load(Ordering::Acquire)
    }

    fn is_masked(&self, vector: u16) -> bool {
        let entry = self.entries.get(usize::from(vector));
        self.is_masked.load(Ordering::Acquire)
            || entry.is_none_or(|entry| entry[CONTROL].load(Ordering::Acquire) & MASKED != 0)
    }

    fn set_pending(&self, vector: u16, is_pending: bool) {
        let Some(bits) = self.pending.get(usize::from(vector / 32)) else { return };
        let bit = 1 << (vector % 32);
        if is_pending {
            bits.fetch_or(bit, Ordering::AcqRel);
        } else {
            bits.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    fn is_pending(&self, vector: u16) -> bool {
        let bits = self.pending.get(usize::from(vector / 32));
        bits.is_some_and(|bits| bits.load(Ordering::Acquire) & 1 << (vector % 32) != 0)
    }
}

impl<I: Interrupts> InterruptVectors<I> {
    pub(super) fn new(interrupts: I, vectors: u16, coalescing: IoQueueCoalescing) -> Self {
        let coalesced = CoalescedCompletions { count: 0, until: Instant::NEVER, is_exempt: false };
        let coalesced = vec![coalesced; usize::from(vectors)].into();
        Self { interrupts, coalescing, coalesced, masked_pending: 0, wake_at: Instant::NEVER }
    }

    /// Applies interrupt coalescing (features 08h and 09h).
    pub(super) fn set_coalescing(
        &mut self,
        coalescing: IoQueueCoalescing,
        is_exempt: impl Fn(u16) -> bool,
    ) {
        self.coalescing = coalescing;
        for (vector, coalesced) in (0..).zip(self.coalesced.iter_mut()) {
            coalesced.is_exempt = is_exempt(vector);
        }
    }

    /// Signals posted completions of an I/O queue, coalesced if enabled.
    #[inline]
    pub(super) fn signal_completions(
        &mut self,
        now: Instant,
        bar: &BarRegisters,
        vector: u16,
        count: u32,
    ) {
        if self.coalescing.threshold <= 1 || self.coalescing.time.ns == 0 {
            self.signal_vector(bar, vector);
        } else {
            self.coalesce_completions(now, bar, vector, count);
        }
    }

    /// Signals a vector without coalescing, as for the admin queue.
    pub(super) fn signal_vector(&mut self, bar: &BarRegisters, vector: u16) {
        let table = bar.msix_vector_table();
        if table.is_enabled() {
            if table.is_masked(vector) {
                // Only the device changes the bit, and a load is cheaper than a redundant
                // read-modify-write.
                if !table.is_pending(vector) {
                    table.set_pending(vector, true);
                }
            } else {
                self.interrupts.raise(vector);
            }
        } else if vector < 32 && bar.interrupt_mask() & 1 << vector != 0 {
            self.masked_pending |= 1 << vector;
        } else {
            self.interrupts.raise(vector);
        }
    }

    /// Raises pending vectors that the host has unmasked.
    pub(super) fn raise_unmasked(&mut self, bar: &BarRegisters) {
        let table = bar.msix_vector_table();
        if table.is_enabled() {
            for vector in (0..).take(self.coalesced.len()) {
                if table.is_pending(vector) && !table.is_masked(vector) {
                    table.set_pending(vector, false);
                    self.interrupts.raise(vector);
                }
            }
        }
        let free = self.masked_pending & !bar.interrupt_mask();
        self.masked_pending &= !free;
        for vector in (0..32).filter(|vector| free & 1 << vector != 0) {
            self.signal_vector(bar, vector);
        }
    }

    /// Signals coalesced completions that are due. Returns whether there were any.
    #[inline]
    pub(super) fn poll(&mut self, now: Instant, bar: &BarRegisters) -> bool {
        now >= self.wake_at && self.signal_due_coalesced(now, bar)
    }

    /// Earliest deadline of coalesced completions.
    pub(super) fn wake_at(&self) -> Instant {
        self.wake_at
    }

    /// Resets the vectors: unsignalled completions are dropped.
    pub(super) fn reset(&mut self, bar: &BarRegisters) {
        for (vector, coalesced) in (0..).zip(self.coalesced.iter_mut()) {
            (coalesced.count, coalesced.until) = (0, Instant::NEVER);
            bar.msix_vector_table().set_pending(vector, false);
        }
        (self.masked_pending, self.wake_at) = (0, Instant::NEVER);
    }

    #[cold]
    fn coalesce_completions(&mut self, now: Instant, bar: &BarRegisters, vector: u16, count: u32) {
        let IoQueueCoalescing { time, threshold } = self.coalescing;
        let Some(coalesced) = self.coalesced.get_mut(usize::from(vector)) else {
            return self.signal_vector(bar, vector);
        };
        coalesced.count = coalesced.count.saturating_add(count);
        if coalesced.is_exempt || coalesced.count >= u32::from(threshold) {
            (coalesced.count, coalesced.until) = (0, Instant::NEVER);
            self.signal_vector(bar, vector);
        } else if coalesced.until == Instant::NEVER {
            coalesced.until = now.after(time);
            self.wake_at = self.wake_at.min(coalesced.until);
        }
    }

    #[cold]
    fn signal_due_coalesced(&mut self, now: Instant, bar: &BarRegisters) -> bool {
        let mut has_signalled = false;
        self.wake_at = Instant::NEVER;
        for index in 0..self.coalesced.len() {
            let coalesced = &mut self.coalesced[index];
            if now >= coalesced.until && coalesced.count > 0 {
                (coalesced.count, coalesced.until) = (0, Instant::NEVER);
                has_signalled = true;
                self.signal_vector(bar, u16::try_from(index).unwrap_or(u16::MAX));
            } else {
                self.wake_at = self.wake_at.min(coalesced.until);
            }
        }
        has_signalled
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{Instant, Span};

    use super::InterruptVectors;
    use crate::controller::transport_interface::IoQueueCoalescing;
    use crate::fuzz::fake_host::RecordedInterrupts;
    use crate::transport::bar_registers::BarRegisters;

    const NOW: Instant = Instant { ns: 1_000 };
    const OFF: IoQueueCoalescing = IoQueueCoalescing { time: Span { ns: 0 }, threshold: 1 };

    fn vectors_with_coalescing(
        coalescing: IoQueueCoalescing,
    ) -> (Arc<BarRegisters>, InterruptVectors<RecordedInterrupts>, RecordedInterrupts) {
        let raised = RecordedInterrupts::default();
        let bar = BarRegisters::new(0, 0, 1, 40);
        bar.enable_and_unmask_vectors();
        (bar, InterruptVectors::new(raised.clone(), 40, coalescing), raised)
    }

    fn take_raised_vectors(raised: &RecordedInterrupts) -> Vec<u16> {
        core::mem::take(&mut raised.0.lock().unwrap())
    }

    fn mask_vector(bar: &BarRegisters, vector: u32, is_masked: bool) {
        bar.write(bar.vector_table_offset() + vector * 16 + 12, 4, is_masked.into());
    }

    #[test]
    fn masked_vector_is_pending_and_raised_once_when_unmasked() {
        let (bar, mut vectors, raised) = vectors_with_coalescing(OFF);
        vectors.signal_completions(NOW, &bar, 33, 1);
        assert_eq!(take_raised_vectors(&raised), [33]);
        mask_vector(&bar, 33, true);
        vectors.signal_completions(NOW, &bar, 33, 1);
        vectors.signal_completions(NOW, &bar, 33, 1);
        vectors.signal_completions(NOW, &bar, 34, 1);
        assert_eq!(take_raised_vectors(&raised), [34]);
        assert_eq!(bar.read(bar.pending_bits_offset() + 4, 4), 1 << 1);
        vectors.raise_unmasked(&bar);
        assert!(take_raised_vectors(&raised).is_empty(), "still masked");
        mask_vector(&bar, 33, false);
        vectors.raise_unmasked(&bar);
        vectors.raise_unmasked(&bar);
        assert_eq!(take_raised_vectors(&raised), [33]);
        assert_eq!(bar.read(bar.pending_bits_offset() + 4, 4), 0);
    }

    #[test]
    fn function_mask_masks_all_vectors_and_the_initial_table_is_masked() {
        let (bar, mut vectors, raised) = vectors_with_coalescing(OFF);
        bar.set_msix_control(true, true);
        vectors.signal_vector(&bar, 0);
        assert!(take_raised_vectors(&raised).is_empty());
        bar.set_msix_control(true, false);
        vectors.raise_unmasked(&bar);
        assert_eq!(take_raised_vectors(&raised), [0]);
        let fresh = BarRegisters::new(0, 0, 1, 2);
        assert_eq!(fresh.read(fresh.vector_table_offset() + 12, 4), 1);
        fresh.write(fresh.vector_table_offset(), 8, 0x1234_5678_9abc_def0);
        assert_eq!(fresh.read(fresh.vector_table_offset(), 8), 0x1234_5678_9abc_def0);
    }

    #[test]
    fn intms_masks_vectors_without_msix() {
        let (bar, mut vectors, raised) = vectors_with_coalescing(OFF);
        bar.set_msix_control(false, false);
        bar.write(0x0c, 4, 0b10);
        vectors.signal_vector(&bar, 0);
        vectors.signal_vector(&bar, 1);
        vectors.signal_vector(&bar, 1);
        assert_eq!(take_raised_vectors(&raised), [0]);
        bar.write(0x10, 4, 0b10);
        vectors.raise_unmasked(&bar);
        assert_eq!(take_raised_vectors(&raised), [1]);
    }

    #[test]
    fn coalescing_signals_at_the_threshold_or_time_limit() {
        let (bar, mut vectors, raised) =
            vectors_with_coalescing(IoQueueCoalescing { time: Span::from_us(100), threshold: 4 });
        vectors.set_coalescing(vectors.coalescing, |vector| vector == 7);
        vectors.signal_completions(NOW, &bar, 7, 1);
        assert_eq!(take_raised_vectors(&raised), [7], "exempt");
        vectors.signal_completions(NOW, &bar, 1, 3);
        assert!(take_raised_vectors(&raised).is_empty());
        vectors.signal_completions(NOW, &bar, 1, 1);
        assert_eq!(take_raised_vectors(&raised), [1], "enough");
        vectors.signal_completions(NOW, &bar, 2, 1);
        let due = NOW.after(Span::from_us(100));
        assert_eq!(vectors.wake_at(), due);
        assert!(!vectors.poll(Instant { ns: due.ns - 1 }, &bar));
        assert!(vectors.poll(due, &bar));
        assert!(!vectors.poll(due.after(Span::from_secs(1)), &bar), "once");
        assert_eq!(take_raised_vectors(&raised), [2], "too long");
        vectors.signal_completions(NOW, &bar, 2, 1);
        vectors.reset(&bar);
        assert!(!vectors.poll(due, &bar));
        assert!(take_raised_vectors(&raised).is_empty(), "a reset forgets");
    }
}
