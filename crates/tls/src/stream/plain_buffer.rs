//! Decrypted bytes that were not consumed.

/// Decrypted bytes, oldest first.
#[derive(Debug, Default)]
pub(super) struct PlainBuffer {
    /// Empty while nothing is buffered.
    memory: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Space of a buffer: what one receive call returns at most. Data of large commands do not pass here.
const BUFFER_BYTES: usize = 128 << 10;
/// Unconsumed bytes up to this length are moved to the front before a receive.
const COMPACT_MAX: usize = 4096;

impl PlainBuffer {
    #[inline]
    pub(super) fn unconsumed(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub(super) fn has_space(&self) -> bool {
        self.end - self.start < BUFFER_BYTES
    }

    /// Space for the next receive; empty if the buffer is full.
    #[inline]
    pub(super) fn free_space(&mut self) -> &mut [u8] {
        if self.memory.is_empty() {
            self.memory = vec![0; BUFFER_BYTES].into_boxed_slice();
        }
        let waiting = self.end - self.start;
        if self.start > 0 && (waiting <= COMPACT_MAX || self.end == self.memory.len()) {
            self.memory.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, waiting);
        }
        &mut self.memory[self.end..]
    }

    #[inline]
    pub(super) fn mark_filled(&mut self, count: usize) {
        self.end += count;
    }

    #[inline]
    pub(super) fn consume(&mut self, count: usize) {
        let waiting = self.end - self.start;
        assert!(count <= waiting, "{count} consumed of {waiting} bytes");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Frees the memory, if nothing is in it.
    pub(super) fn release_if_empty(&mut self) {
        if self.is_empty() {
            *self = Self::default();
        }
    }
}
