//! The files that a copy stands on: looked at before they are opened, since opening makes and grows
//! those of the target, and put back as they were if the copy is refused.

use std::path::Path;

use block::uri::Uri;
use block::{Existing, guard};
use host::file::{Before, holds_data, reach};
use host::machine::Machine;

use crate::copy::files_of;
use crate::{EmuMedium, EmuSpec, Refused};

/// The files of a target as they were found.
pub(super) struct Found {
    files: Vec<Before>,
}

/// Bytes in a block of a file where its name does not say.
const BLOCK_DEFAULT: u32 = 512;

impl Found {
    /// Looks at what `target` stands on.
    pub(super) fn look(target: &Uri) -> Self {
        Self { files: files_of(target).iter().filter_map(|path| Before::look(path)).collect() }
    }

    /// Refuses what would be lost, unless that may go, before it is so much as grown.
    pub(super) fn allow(&self, may_go: bool) -> Result<(), Refused> {
        let there = self.files.iter().filter(|file| file.len_bytes() > 0);
        let existing = there.map(|file| Existing {
            name: file.path().display().to_string(),
            found: format!("{} bytes", file.len_bytes()),
            path: Some(file.path().into()),
        });
        allow(existing.collect(), may_go)
    }

    /// Refuses a record that says of a file that was not there what is on it.
    pub(super) fn check(&self, record: &Path, until: u64) -> Result<(), Refused> {
        let is_new = |file: &&Before| file.len_bytes() == 0 && reach(file.path()).exists();
        let Some(file) = self.files.iter().find(is_new).filter(|_| until > 0) else {
            return Ok(());
        };
        let (file, record) = (file.path().display(), record.display());
        let text = format!(
            "go on with the copy to {file}: it was not there or was empty, and the record says that \
             {until} bytes are on it"
        );
        Err(Refused::caller(text).with_hint(format!("To begin anew, remove {record}.")))
    }

    /// Puts everything back: nothing has been copied.
    pub(super) fn put_back(&self) {
        self.files.iter().for_each(Before::put_back);
    }
}

/// Refuses what would be lost, unless that may go. A file that is one hole is no loss: a copy that
/// ended before it began leaves such.
pub(super) fn allow(mut existing: Vec<Existing>, may_go: bool) -> Result<(), Refused> {
    existing.retain(|one| one.path.as_deref().is_none_or(holds_data));
    Ok(guard::allow("copy", &existing, may_go, &Machine::this())?)
}

/// Refuses files of which a device that stands on them would not see the end. What a mirror, a
/// stripe or a volume stands on is left out: the ends of those never were a part of it.
pub(super) fn check_whole(source: &Uri) -> Result<(), Refused> {
    match source.scheme() {
        "mirror" | "stripe" | "volume" => Ok(()),
        "file" => {
            let mut fields = source.fields();
            let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
            // A size that is asked for is of whole blocks, or the file is not opened.
            let has_size = fields.size("size")?.is_some();
            if has_size { Ok(()) } else { check_file(source, source.path(), block_size) }
        }
        "emu" => check_emulated(source),
        _ => source.children().iter().try_for_each(check_whole),
    }
}

/// An emulated SSD over a file is as long as the file.
fn check_emulated(source: &Uri) -> Result<(), Refused> {
    // What is wrong with its name is told when it is opened.
    let Ok(spec) = source.to_string().parse::<EmuSpec>() else { return Ok(()) };
    match &spec.medium {
        EmuMedium::File { path } if spec.size_bytes_known().is_none() => {
            check_file(source, path, spec.block_size)
        }
        _ => Ok(()),
    }
}

fn check_file(source: &Uri, path: &str, block_size: u32) -> Result<(), Refused> {
    let len = Path::new(path).metadata().map_or(0, |found| found.len());
    let rest = len % u64::from(block_size);
    if rest == 0 {
        return Ok(());
    }
    let text = format!(
        "copy {source}: it has {len} bytes, expected whole blocks of {block_size}: the last {rest} \
         bytes would be lost"
    );
    Err(Refused::caller(text)
        .with_hint(format!("To copy it with zeroes behind: truncate --size=%{block_size} {path}")))
}

/// The target, as long as the source if it is a file that holds nothing yet.
pub(super) fn sized(target: &Uri, size: u64) -> Result<Uri, Refused> {
    let mut fields = target.fields();
    if target.scheme() != "file" || fields.size("size")?.is_some() {
        return Ok(target.clone());
    }
    let block = u64::from(fields.block_size()?.unwrap_or(BLOCK_DEFAULT));
    match Before::look(Path::new(target.path())) {
        Some(found) if found.len_bytes() == 0 => {
            Ok(target.clone().with("size", size.next_multiple_of(block).to_string()))
        }
        _ => Ok(target.clone()),
    }
}
