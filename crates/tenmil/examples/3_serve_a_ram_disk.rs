//! Exports a RAM disk over NVMe/TCP and reads it in the same program. A Linux host would connect to
//! it with `nvme connect`.

use tenmil::{Access, Error, Export, Runtime};

const NQN: &str = "nqn.2026-01.org.tenmil:example";

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rt = Runtime::new()?;
    rt.block_on(serve_and_read(&rt))?;
    Ok(())
}

async fn serve_and_read(rt: &Runtime) -> Result<(), Error> {
    // Namespace 1 of a subsystem. Port 0 selects a free port.
    let disk = rt.open("ram:32m", Access::ReadWrite).await?;
    let export = Export::nvme_tcp("127.0.0.1:0").nqn(NQN).namespace(disk);
    let server = rt.serve(export).await?;

    // Host side: opened like any other device.
    let device = rt.open(&server.uris()[0], Access::ReadWrite).await?;
    let mut buffer = device.buffer(4096)?;
    buffer.store(0, b"ten million");
    let buffer = device.write(0, buffer).await?;
    let buffer = device.read(0, buffer).await?;
    assert!(buffer.to_vec().starts_with(b"ten million"));
    println!("{} has served a block", server.uris()[0]);

    // Optional: both end when they are dropped. These wait for it.
    device.close().await;
    server.stop().await;
    Ok(())
}
