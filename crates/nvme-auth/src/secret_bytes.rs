//! Bytes that are overwritten on drop, compared in constant time and never printed.

use core::fmt;
use std::sync::OnceLock;

use ctutils::CtEq;
use zeroize::Zeroizing;

/// Secret bytes. They are overwritten on drop; `Debug` prints their number; `==` takes a time that
/// depends on the lengths only.
///
/// They lie in the memory that [`set_secret_allocator`] provides, otherwise on the heap.
pub struct SecretBytes(Storage);

/// Memory for a secret, which overwrites its bytes on drop. A program provides it, for example
/// memory that is locked and in no core dump.
pub trait SecretMemory: Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];

    /// The bytes, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Allocates memory for a secret of some bytes; `None` if there is none.
pub type SecretAllocator = fn(usize) -> Option<Box<dyn SecretMemory>>;

enum Storage {
    Heap(Zeroizing<Vec<u8>>),
    Provided(Box<dyn SecretMemory>),
}

static ALLOCATOR: OnceLock<SecretAllocator> = OnceLock::new();

/// Sets the allocator of all secrets that this process creates from now on. Only the first call has
/// an effect.
pub fn set_secret_allocator(allocator: SecretAllocator) {
    let _ = ALLOCATOR.set(allocator);
}

impl SecretBytes {
    /// Takes over bytes that hold a secret. If memory is provided, they are moved there.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        let bytes = Zeroizing::new(bytes);
        Self::copy_to_provided(&bytes).unwrap_or(Self(Storage::Heap(bytes)))
    }

    /// The bytes, for a cipher or a file.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        match &self.0 {
            Storage::Heap(bytes) => bytes,
            Storage::Provided(memory) => memory.bytes(),
        }
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.expose().len()
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.expose().is_empty()
    }

    fn copy_to_provided(bytes: &[u8]) -> Option<Self> {
        let mut memory = ALLOCATOR.get()?(bytes.len())?;
        // Memory of another length is not used.
        memory.bytes_mut().get_mut(..bytes.len())?.copy_from_slice(bytes);
        (memory.bytes().len() == bytes.len()).then_some(Self(Storage::Provided(memory)))
    }
}

impl Clone for SecretBytes {
    fn clone(&self) -> Self {
        let bytes = self.expose();
        Self::copy_to_provided(bytes)
            .unwrap_or_else(|| Self(Storage::Heap(Zeroizing::new(bytes.to_vec()))))
    }
}

impl PartialEq for SecretBytes {
    fn eq(&self, other: &Self) -> bool {
        self.expose().ct_eq(other.expose()).to_bool()
    }
}

impl Eq for SecretBytes {}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "SecretBytes({} bytes)", self.len())
    }
}
