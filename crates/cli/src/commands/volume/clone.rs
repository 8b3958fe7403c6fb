//! `tenmil volume clone`: clones a volume or snapshot of the pool, or an external image.

use clap::Args;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_rpc::pool_commands::PoolCommand;

use super::{ByteSize, CommandOutput, command_result_output, execute_and_render, open_pool_of};
use tenmil_base::Error;

#[derive(Debug, Args)]
pub(super) struct CloneArguments {
    /// Parent volume or snapshot; with --from, the volume to create
    #[arg(value_name = "VOLUME")]
    pub(super) volume: Uri,

    /// Name of the clone, in the same pool
    #[arg(value_name = "NAME", required_unless_present = "from", conflicts_with = "from")]
    pub(super) name: Option<String>,

    /// Read unwritten blocks from this external image, which must not change: any device, or a snapshot
    /// of another pool
    #[arg(long, value_name = "URI")]
    pub(super) from: Option<Uri>,

    /// Size of the volume [default: the size of the image]; blocks beyond the image read as zeroes
    #[arg(long, value_name = "BYTES", requires = "from")]
    size: Option<ByteSize>,

    /// Cluster size (allocation unit): 4k, 8k, 16k, 32k or 64k [default: 64k]
    #[arg(long, value_name = "BYTES", requires = "from")]
    cluster_size: Option<ByteSize>,

    /// Store a checksum of every written block; blocks of the image have none
    #[arg(long, requires = "from")]
    checksums: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Default cluster size.
pub(super) const UNIT: ByteSize = ByteSize(64 << 10);

/// Creates a clone.
pub(super) fn clone_volume(opener: &Opener<'_>, it: &CloneArguments) -> CommandOutput {
    match (&it.from, &it.name) {
        (Some(image), _) => clone_from_image(opener, it, image),
        (None, name) => clone_in_pool(opener, it, name.as_deref().unwrap_or_default()),
    }
}

/// Clones a volume or snapshot of the same pool.
fn clone_in_pool(opener: &Opener<'_>, it: &CloneArguments, name: &str) -> CommandOutput {
    // clap does not check `requires` where NAME, which conflicts with --from, is given.
    let said = [
        ("size", it.size.is_some()),
        ("cluster-size", it.cluster_size.is_some()),
        ("checksums", it.checksums),
    ];
    if let Some((switch, _)) = said.into_iter().find(|(_, is_said)| *is_said) {
        let text = format!("clone {}: --{switch} is given, expected only with --from", it.volume);
        let hint = "A clone of a volume is like the volume; leave it out.";
        return Err(Error::usage(text).with_hint(hint));
    }
    let order = |from| PoolCommand::Clone { from, name: name.to_owned() };
    execute_and_render(opener, &it.volume, order, it.json)
}

/// Creates a volume over an external image.
fn clone_from_image(opener: &Opener<'_>, it: &CloneArguments, image: &Uri) -> CommandOutput {
    let ByteSize(unit_bytes) = it.cluster_size.unwrap_or(UNIT);
    let size_bytes = it.size.map(|ByteSize(bytes)| bytes);
    let (mut access, name) = open_pool_of(opener, &it.volume)?;
    if let (Some(pid), Some(path)) = (access.owner_pid(), relative_file_path(image)) {
        let text = format!(
            "clone {}: process {pid} has the pool open and its own folder: found {path}, expected a \
             path from / on",
            it.volume
        );
        return Err(Error::usage(text).with_hint("Give the absolute path of the image."));
    }
    let (image, checksums) = (image.clone(), it.checksums);
    let order = PoolCommand::CreateOver { name, image, size_bytes, unit_bytes, checksums };
    let result = access.execute_command(&order)?;
    Ok(Some(command_result_output::render_result(&result, &access, it.json)))
}

/// A relative file path below the device, which would be resolved by whichever process opens it.
fn relative_file_path(device: &Uri) -> Option<&str> {
    match device.scheme() {
        "file" => Some(device.path()).filter(|path| !path.starts_with('/')),
        _ => device.children().iter().find_map(relative_file_path),
    }
}
