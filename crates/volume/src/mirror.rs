//! On-disk format of mirrors: superblocks and dirty-region maps.

mod ownership;
mod region_bitmap;
mod superblock;

pub use ownership::Ownership;
pub use region_bitmap::RegionBitmap;
pub use superblock::{
    COPIES_AT, CommonFields, LEGS_MAX, MirrorGeometry, NoSuperblock, SUPERBLOCK_BYTES, Superblock,
    uuid_text,
};
