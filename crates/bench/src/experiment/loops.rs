//! Micro-benchmarks of techniques that no option can switch off. The loops differ in the technique
//! only. What a loop saves is not what an I/O saves, which includes more work.

mod random_lba;
mod slots;

pub use random_lba::{divide, multiply};
pub use slots::{DenseSlots, IndirectSlots, PageSpacedSlots, PrefetchLoop, Ring, SlotLayout};
