//! `tenmil volume clone`: of a volume or a snapshot of the store, or of an image elsewhere.

use block::Opener;
use block::uri::Uri;
use clap::Args;
use control::orders::Order;

use super::{Printed, Size, give, hand_on, said};
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
pub(super) fn clone(opener: &Opener<'_>, it: &CloneArguments) -> Printed {
    match (&it.from, &it.name) {
        (Some(image), _) => over(opener, it, image),
        (None, name) => inside(opener, it, name.as_deref().unwrap_or_default()),
    }
}

/// One of a volume or a snapshot of the same store.
fn inside(opener: &Opener<'_>, it: &CloneArguments, name: &str) -> Printed {
    // The parser does not look at what they require where NAME is given.
    let said =
        [("size", it.size.is_some()), ("unit", it.unit.is_some()), ("checksums", it.checksums)];
    if let Some((switch, _)) = said.into_iter().find(|(_, is_said)| *is_said) {
        let text = format!("clone {}: --{switch} is given, expected only with --from", it.volume);
        let hint = "A clone of a volume is like the volume; leave it out.";
        return Err(Refused::caller(text).with_hint(hint));
    }
    let order = |from| Order::Clone { from, name: name.to_owned() };
    give(opener, &it.volume, order, it.json)
}

/// One of an image elsewhere.
fn over(opener: &Opener<'_>, it: &CloneArguments, image: &Uri) -> Printed {
    let Size(unit_bytes) = it.unit.unwrap_or(UNIT);
    let size_bytes = it.size.map(|Size(bytes)| bytes);
    let (mut hand, name) = hand_on(opener, &it.volume)?;
    if let (Some(pid), Some(path)) = (hand.pid(), relative(image)) {
        let text = format!(
            "clone {}: process {pid} has the store open and its own folder: found {path}, expected a \
             path from / on",
            it.volume
        );
        return Err(Refused::caller(text).with_hint("Say the whole path of the image."));
    }
    let (image, checksums) = (image.clone(), it.checksums);
    let order = Order::CreateOver { name, image, size_bytes, unit_bytes, checksums };
    let told = hand.order(&order)?;
    Ok(Some(said::render(&told, &hand, it.json)))
}

/// A file of a device that is found from the folder of whoever opens it.
fn relative(device: &Uri) -> Option<&str> {
    match device.scheme() {
        "file" => Some(device.path()).filter(|path| !path.starts_with('/')),
        _ => device.children().iter().find_map(relative),
    }
}
