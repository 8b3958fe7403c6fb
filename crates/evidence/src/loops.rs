//! Techniques that no switch can take away, as loops of their own: what differs is the technique, and
//! nothing else is in the loop. What a loop saves is not what an I/O saves: around it there is more.

mod places;
mod slots;

pub use places::{divide, multiply};
pub use slots::{Ahead, Apart, Behind, Dense, Ring, Table};
