//! On-disk format of mirrors: superblocks and dirty-region maps.

mod ownership;
mod region_bitmap;
mod superblock;

pub use ownership::MirrorOwnership;
pub use region_bitmap::RegionBitmap;
pub use superblock::{
    COPIES_AT, LEGS_MAX, MirrorCommonFields, MirrorGeometry, MirrorSuperblock, SUPERBLOCK_BYTES,
    SuperblockError, uuid_text,
};
