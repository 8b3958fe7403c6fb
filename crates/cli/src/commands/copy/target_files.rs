//! Files below the target of a copy, recorded before the target is opened: opening creates and grows
//! files, and a rejected copy restores them.

use std::path::Path;

use tenmil_block::uri::Uri;
use tenmil_block::{ExistingData, overwrite};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::storage_file::{FileUndo, may_contain_data, path_or_proc_link};

use crate::copy::backing_files;
use tenmil_base::Error;
use tenmil_devices::{EmuMedium, EmuSpec};

/// Target files in their original state.
pub(super) struct OriginalTargetFiles {
    files: Vec<FileUndo>,
}

/// Default block size of a file device.
const BLOCK_DEFAULT: u32 = 512;

impl OriginalTargetFiles {
    /// Records the files below `target`.
    pub(super) fn inspect(target: &Uri) -> Self {
        Self {
            files: backing_files(target)
                .iter()
                .filter_map(|path| FileUndo::of_path(path))
                .collect(),
        }
    }

    /// Rejects existing data unless they may be overwritten, before a file is grown.
    pub(super) fn check_overwrite_allowed(&self, may_go: bool) -> Result<(), Error> {
        let there = self.files.iter().filter(|file| file.len_bytes() > 0);
        let existing = there.map(|file| ExistingData {
            name: file.path().display().to_string(),
            found: format!("{} bytes", file.len_bytes()),
            path: Some(file.path().into()),
        });
        check_existing_data(existing.collect(), may_go)
    }

    /// Rejects a checkpoint that claims progress on a file that did not exist.
    pub(super) fn check_checkpoint(&self, record: &Path, until: u64) -> Result<(), Error> {
        let is_new =
            |file: &&FileUndo| file.len_bytes() == 0 && path_or_proc_link(file.path()).exists();
        let Some(file) = self.files.iter().find(is_new).filter(|_| until > 0) else {
            return Ok(());
        };
        let (file, record) = (file.path().display(), record.display());
        let text = format!(
            "resume the copy to {file}: it did not exist or was empty, and the record states that \
             {until} bytes are on it"
        );
        Err(Error::usage(text).with_hint(format!("To start over, remove {record}.")))
    }

    /// Restores the original state; called only if nothing has been copied.
    pub(super) fn restore_original(&self) {
        self.files.iter().for_each(FileUndo::restore_state);
    }
}

/// Rejects existing data unless they may be overwritten. A file that is a single hole holds no data: a
/// copy that failed before its start leaves such a file.
pub(super) fn check_existing_data(
    mut existing: Vec<ExistingData>,
    may_go: bool,
) -> Result<(), Error> {
    existing.retain(|one| one.path.as_deref().is_none_or(may_contain_data));
    Ok(overwrite::check_overwrite_allowed("copy", &existing, may_go, &KernelFiles::live_system())?)
}

/// Rejects source files whose size is not a multiple of the block size, because the device would not
/// expose their end. Files below a mirror, stripe or volume are exempt: their ends never were part of
/// the device.
pub(super) fn check_source_sizes(source: &Uri) -> Result<(), Error> {
    match source.scheme() {
        "mirror" | "stripe" | "volume" => Ok(()),
        "file" => {
            let mut fields = source.options();
            let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
            // The file device itself rejects an explicit size that is not a multiple of the block size.
            let has_size = fields.size_value("size")?.is_some();
            if has_size {
                Ok(())
            } else {
                check_file_size_is_whole_blocks(source, source.path(), block_size)
            }
        }
        "emu" => check_emulated_source_is_whole_blocks(source),
        _ => source.children().iter().try_for_each(check_source_sizes),
    }
}

/// The same check for an emulated SSD over a file.
fn check_emulated_source_is_whole_blocks(source: &Uri) -> Result<(), Error> {
    // An invalid name is reported when the device is opened.
    let Ok(spec) = source.to_string().parse::<EmuSpec>() else { return Ok(()) };
    match &spec.medium {
        EmuMedium::File { path } if spec.size_bytes_known().is_none() => {
            check_file_size_is_whole_blocks(source, path, spec.block_size)
        }
        _ => Ok(()),
    }
}

fn check_file_size_is_whole_blocks(source: &Uri, path: &str, block_size: u32) -> Result<(), Error> {
    let len = Path::new(path).metadata().map_or(0, |found| found.len());
    let rest = len % u64::from(block_size);
    if rest == 0 {
        return Ok(());
    }
    let text = format!(
        "copy {source:#}: it has {len} bytes, expected whole blocks of {block_size}: the last {rest} \
         bytes would be lost"
    );
    Err(Error::usage(text)
        .with_hint(format!("To copy it with zeroes behind: truncate --size=%{block_size} {path}")))
}

/// The target URI, with the size of the source if it is an empty or missing file.
pub(super) fn with_source_size(target: &Uri, size: u64) -> Result<Uri, Error> {
    let mut fields = target.options();
    if target.scheme() != "file" || fields.size_value("size")?.is_some() {
        return Ok(target.clone());
    }
    let block = u64::from(fields.block_size()?.unwrap_or(BLOCK_DEFAULT));
    match FileUndo::of_path(Path::new(target.path())) {
        Some(found) if found.len_bytes() == 0 => {
            Ok(target.clone().with_option("size", size.next_multiple_of(block).to_string()))
        }
        _ => Ok(target.clone()),
    }
}
