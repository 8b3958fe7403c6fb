//! Micro-benchmarks of techniques that no option can switch off. The loops differ in the technique
//! only. What a loop saves is not what an I/O saves, which includes more work.

mod random_lba;
mod slot_layouts;

pub use random_lba::{sum_of_draws_by_division, sum_of_draws_by_multiplication};
pub use slot_layouts::{
    CompletionOrder, DenseSlots, IndirectSlots, PageSpacedSlots, PrefetchLoop, SlotLayout,
};
