//! A file as a block device, used from tokio. The reactors have threads of their own, and the
//! handle works on any thread.

use tenmil::{Access, Device, Error, Runtime};

async fn write_and_read_back(device: Device, lba: u64) -> Result<bool, Error> {
    let (mut written, empty) = (device.buffer(4096)?, device.buffer(4096)?);
    written.store(0, format!("block {lba}").as_bytes());
    // Force Unit Access: the block is persistent when the write completes.
    let written = device.write_fua(lba, written).await?;
    let read = device.read(lba, empty).await?;
    Ok(read.to_vec() == written.to_vec())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rt = Runtime::new()?;
    let path = std::env::temp_dir().join(format!("tenmil-example-{}", std::process::id()));
    let uri = format!("file:{}?size=1m&block=4k", path.display());
    let device = rt.open(&uri, Access::ReadWrite).await?;

    let start = |lba| tokio::spawn(write_and_read_back(device.clone(), lba));
    let tasks: Vec<_> = (0..32).map(start).collect();
    for task in tasks {
        assert!(task.await??, "what was read is not what was written");
    }
    println!("32 tasks of tokio have written and read back");
    device.close().await;
    std::fs::remove_file(path)?;
    Ok(())
}
