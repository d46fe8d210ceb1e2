/* A test double of libcuda.so.1: one GPU for every /dev/nvidiaN from 0 to 9, with N as the end of its UUID. */
extern int access(const char *, int);

static int numbers[10];
static int count = -1;

static void look(void)
{
    static char path[] = "/dev/nvidia0";
    int n;
    for (count = 0, n = 0; n < 10; n++) {
        path[11] = '0' + n;
        if (access(path, 0) == 0)
            numbers[count++] = n;
    }
}

int cuInit(unsigned int flags)
{
    look();
    if (access("/dev/nvidiactl", 0) || access("/dev/nvidia-uvm", 0))
        return 999;
    return count ? 0 : 100;
}

int cuDeviceGetCount(int *found) { *found = count; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }

int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    int n;
    for (n = 0; n < 15; n++)
        uuid[n] = 0;
    uuid[15] = numbers[device] + 0x10;
    return 0;
}

int cuGetErrorName(int code, const char **name)
{
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
