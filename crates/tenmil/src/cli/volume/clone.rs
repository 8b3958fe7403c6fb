//! `tenmil volume clone`: of a volume or a snapshot of the store, or of an image elsewhere.

use block::Opener;
use block::store::{Change, PAGE_BYTES, Place};
use block::uri::Uri;
use clap::Args;

use super::super::store::size;
use super::said::Said;
use super::{Size, blocks, find, make, uuid};
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct CloneArguments {
    /// What it is made from; with --from, the volume that is made
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// What it is to be called, in the same store
    #[arg(value_name = "NAME", required_unless_present = "from", conflicts_with = "from")]
    name: Option<String>,

    /// Read what is not written from this image, which nobody may change: any device, or a snapshot of
    /// another store
    #[arg(long, value_name = "URI")]
    from: Option<Uri>,

    /// How large it is, if not like the image; behind its end it reads as zeroes
    #[arg(long, value_name = "BYTES", requires = "from")]
    size: Option<Size>,

    /// In what pieces room is given to it: 4k, 8k, 16k, 32k or 64k, which it is if not said
    #[arg(long, value_name = "BYTES", requires = "from")]
    unit: Option<Size>,

    /// Keep a checksum of every block that is written; the image has none
    #[arg(long, requires = "from")]
    checksums: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// In what pieces room is given if nothing is said.
const UNIT: Size = Size(64 << 10);

/// Makes a clone.
pub(super) fn clone(opener: &Opener<'_>, it: &CloneArguments) -> Result<Said, Refused> {
    match (&it.from, &it.name) {
        (Some(image), _) => over(opener, it, image),
        (None, name) => inside(opener, it, name.as_deref().unwrap_or_default()),
    }
}

/// One of a volume or a snapshot of the same store.
fn inside(opener: &Opener<'_>, it: &CloneArguments, name: &str) -> Result<Said, Refused> {
    // The parser does not look at what they require where NAME is given.
    let said =
        [("size", it.size.is_some()), ("unit", it.unit.is_some()), ("checksums", it.checksums)];
    if let Some((switch, _)) = said.into_iter().find(|(_, is_said)| *is_said) {
        let text = format!("clone {}: --{switch} is given, expected only with --from", it.volume);
        let hint = "A clone of a volume is like the volume; leave it out.";
        return Err(Refused::caller(text).with_hint(hint));
    }
    let (open, from) = find(opener, &it.volume)?;
    let opens = Place::of(&it.volume)?.with_name(name);
    let change = Change::Clone { from: from.clone(), name: name.into(), uuid: uuid() };
    let text = || format!("volume `{name}`, a clone of `{from}`: {opens}\n");
    Ok(make(&open, change, text)?.of(name))
}

/// One of an image elsewhere.
fn over(opener: &Opener<'_>, it: &CloneArguments, image: &Uri) -> Result<Said, Refused> {
    let volume = &it.volume;
    let unit = blocks(volume, "unit", it.unit.unwrap_or(UNIT))?;
    let wanted = it.size.map(|size| blocks(volume, "size", size)).transpose()?;
    let (open, name) = find(opener, volume)?;
    let parent = open.look_at_parent(opener, image)?;
    let blocks = wanted.unwrap_or(parent.blocks);
    let (uuid, checksums) = (uuid(), it.checksums);
    let change = Change::CreateOver { name: name.clone(), blocks, unit, uuid, checksums, parent };
    let whole = size(blocks * u64::from(PAGE_BYTES));
    let text = || format!("volume `{name}` of {whole}, a clone of {image}: {volume}\n");
    Ok(make(&open, change, text)?.of(&name))
}
